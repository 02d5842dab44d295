"""Print the command by which uv installs as pip is configured to: ``uv_command.py UV PYTHON``.

uv reads nothing of pip's configuration, so each setting of it (files and ``PIP_*``, as ``pip
config list`` shows them) becomes an option of uv. Words end with a zero byte. Exit code 1, with
the reason on standard error, where pip is told something that uv cannot be told.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class NotForUvError(Exception):
    """Pip is configured in a way that uv has no option for; the message names the setting."""


def _path(value: str) -> str:
    """A path with ``~``, which pip expands and uv does not; addresses stay."""
    return str(Path(value).expanduser()) if value.startswith("~") else value


def _each(option: str) -> Callable[[str], list[str]]:
    """An option for each word: pip divides what may be given several times at blanks."""
    return lambda value: [word for one in value.split() for word in (option, _path(one))]


def _switch(option: str) -> Callable[[str], list[str]]:
    """A switch, which pip takes as off by these words."""
    off = ("", "0", "n", "no", "f", "false", "off")
    return lambda value: [] if value.lower() in off else [option]


def _formats(option: str) -> Callable[[str], list[str]]:
    """An option for each package: pip divides these at commas."""
    return lambda value: [word for one in value.replace(",", " ").split() for word in (option, one)]


OPTIONS: dict[str, Callable[[str], list[str]]] = {
    "index-url": lambda value: ["--default-index", value],
    "pypi-url": lambda value: ["--default-index", value],
    "extra-index-url": _each("--extra-index-url"),
    "no-index": _switch("--no-index"),
    "find-links": _each("--find-links"),
    "constraint": _each("--constraints"),
    "build-constraint": _each("--build-constraints"),
    "cert": lambda value: ["--cert", _path(value)],
    "trusted-host": _each("--allow-insecure-host"),
    "no-binary": _formats("--no-binary"),
    "only-binary": _formats("--only-binary"),
    "no-cache-dir": _switch("--no-cache"),
    "pre": lambda value: ["--prerelease", "allow"] if _switch("on")(value) else [],
}
"""Setting of pip -> options of uv."""
VARIABLES = {
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
"""Setting of pip -> variables of uv, which has no option for it."""
WITHOUT_EFFECT = frozenset(
    (
        *("disable-pip-version-check", "config-file", "cache-dir", "log", "no-input", "isolated"),
        *("quiet", "verbose", "no-color", "progress-bar", "debug", "no-clean", "exists-action"),
        *("compile", "no-compile", "prefer-binary", "require-virtualenv", "root-user-action"),
        *("no-python-version-warning", "no-warn-script-location", "no-warn-conflicts"),
        *("break-system-packages", "use-pep517", "resume-retries"),
    )
)
"""Settings of pip that do not change what is installed into an environment, or from where."""
CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Where pip looks for certificates when its configuration names none."""
SYSTEM_STORE_SINCE = (24, 2)
"""Release of pip from which it trusts what the system trusts."""


def settings_of(listing: str) -> dict[str, str]:
    """Return the settings that hold for ``pip install``, of what ``pip config list`` prints.

    Those of the command beat global ones, and variables beat both.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections and (text := str(ast.literal_eval(value)).strip()):
            sections[section][name] = text
    return {name: value for part in sections.values() for name, value in part.items()}


def uv_words(
    settings: Mapping[str, str], variables: Mapping[str, str], pip_release: tuple[int, ...]
) -> tuple[list[str], list[str]]:
    """Translate settings of pip.

    Args:
        settings: See :func:`settings_of`.
        variables: The environment.
        pip_release: Which pip they are of.

    Returns:
        Variables to set, as ``NAME=value``, and options.

    Raises:
        NotForUvError: a setting has no counterpart.
    """
    settings = dict(settings)
    set_variables: list[str] = []
    # pip compares what all indexes have; uv would stop at the first that has the package.
    options = ["--index-strategy", "unsafe-best-match"]
    bundles = [variables[name] for name in CA_VARIABLES if variables.get(name)]
    if "cert" not in settings and bundles:
        settings["cert"] = bundles[0]
    elif "cert" not in settings and pip_release >= SYSTEM_STORE_SINCE:
        options.append("--system-certs")
    for name, value in settings.items():
        if name in OPTIONS:
            options += OPTIONS[name](value)
        elif name in VARIABLES:
            set_variables += [f"{variable}={value}" for variable in VARIABLES[name]]
        elif (name, value) == ("use-feature", "truststore"):
            options.append("--system-certs")
        elif (name, value) == ("keyring-provider", "subprocess"):
            options += ["--keyring-provider", "subprocess"]
        elif name not in WITHOUT_EFFECT and (name, value) != ("keyring-provider", "disabled"):
            raise NotForUvError(f"pip is configured with {name} = {value}, which uv does not know")
    return set_variables, options


def main() -> None:
    """Write the command to standard output."""
    uv, python = sys.argv[1:]
    pip = [python, "-m", "pip"]
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True)
    named = subprocess.run([*pip, "--version"], capture_output=True, text=True, check=True)
    release = tuple(int(part) for part in named.stdout.split()[1].split(".")[:2])
    try:
        set_variables, options = uv_words(settings_of(listing.stdout), os.environ, release)
    except NotForUvError as error:
        sys.exit(str(error))
    install = [uv, "pip", "install", "--no-config", "--python", python]
    words = ["env", *set_variables, *install, *options]
    sys.stdout.write("".join(f"{word}\0" for word in words))


if __name__ == "__main__":
    main()
