"""requirements/uv_command.py: what pip is configured with, as options of uv."""

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "uv_command.py"
_spec = importlib.util.spec_from_file_location("uv_command", SCRIPT)
uv_command = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(uv_command)

OLD, NEW = (23, 2), (24, 2)
BEST = ["--index-strategy", "unsafe-best-match"]


def words(settings, variables=None, release=OLD):
    set_variables, options = uv_command.uv_words(settings, variables or {}, release)
    assert options[:2] == BEST
    return [*set_variables, *options[2:]]


def test_variables_beat_the_command_which_beats_what_is_global():
    listing = """
:env:.find-links='/c'
:env:.empty=''
download.index-url='of another command'
freeze.timeout='10'
global.find-links='/a'
global.index-url='https://one/simple'
global.retries='3'
install.find-links='/b'
install.index-url='https://two/simple'
"""
    assert uv_command.settings_of(listing) == {
        "find-links": "/c",
        "index-url": "https://two/simple",
        "retries": "3",
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"index-url": "https://u:p@one/simple"}, ["--default-index", "https://u:p@one/simple"]),
        (
            {"extra-index-url": "https://a\nfile:///b"},
            ["--extra-index-url", "https://a", "--extra-index-url", "file:///b"],
        ),
        ({"find-links": "/a ~/b"}, ["--find-links", "/a", "--find-links", "HOME/b"]),
        ({"constraint": "a.txt b.txt"}, ["--constraints", "a.txt", "--constraints", "b.txt"]),
        ({"cert": "~/ca.pem"}, ["--cert", "HOME/ca.pem"]),
        ({"trusted-host": "one two:81"},
         ["--allow-insecure-host", "one", "--allow-insecure-host", "two:81"]),
        ({"no-index": "true"}, ["--no-index"]),
        ({"no-index": "0", "no-cache-dir": "off"}, []),
        ({"no-binary": "a,b"}, ["--no-binary", "a", "--no-binary", "b"]),
        ({"only-binary": ":all:"}, ["--only-binary", ":all:"]),
        ({"pre": "yes"}, ["--prerelease", "allow"]),
        ({"pre": "no"}, []),
        ({"client-cert": "/c.pem"}, ["SSL_CLIENT_CERT=/c.pem"]),
        (
            {"proxy": "http://p:3128"},
            [f"{name}=http://p:3128" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")],
        ),
        ({"default-timeout": "180", "retries": "9"}, ["UV_HTTP_TIMEOUT=180", "UV_HTTP_RETRIES=9"]),
        ({"use-feature": "truststore"}, ["--system-certs"]),
        ({"keyring-provider": "subprocess"}, ["--keyring-provider", "subprocess"]),
        ({"keyring-provider": "disabled", "progress-bar": "off", "quiet": "1"}, []),
    ],
)  # fmt: skip
def test_each_setting_holds_for_uv(settings, expected):
    home = str(Path.home())
    assert words(settings) == [word.replace("HOME", home) for word in expected]


@pytest.mark.parametrize(
    ("name", "value"),
    [("user", "true"), ("target", "/x"), ("no-deps", "1"), ("require-hashes", "true"),
     ("keyring-provider", "import"), ("use-feature", "fast-deps"), ("of-tomorrow", "1")],
)  # fmt: skip
def test_a_setting_that_uv_does_not_know_is_refused_by_name(name, value):
    with pytest.raises(uv_command.NotForUvError, match=f"with {name} = {value}, which uv does"):
        words({name: value})


def test_certificates_are_those_that_pip_would_take():
    bundles = {"REQUESTS_CA_BUNDLE": "/r.pem", "CURL_CA_BUNDLE": "/c.pem"}
    assert words({}) == []
    assert words({}, release=NEW) == ["--system-certs"]
    assert words({}, bundles, NEW) == ["--cert", "/r.pem"]
    assert words({}, {"CURL_CA_BUNDLE": "/c.pem", "REQUESTS_CA_BUNDLE": ""}) == ["--cert", "/c.pem"]
    assert words({"cert": "/own.pem"}, bundles, NEW) == ["--cert", "/own.pem"]


def test_files_and_variables_of_this_pip_are_read(tmp_path):
    indexes = "extra_index_url =\n  https://a/simple\n  https://b/simple"
    (tmp_path / "pip.conf").write_text(f"[global]\n{indexes}\n[install]\nno-index = 1\n")

    def run(**variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment = {**kept, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables}
        command = [sys.executable, str(SCRIPT), "/x/uv", sys.executable]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    said = run(PIP_FIND_LINKS="/w 1").stdout.split("\0")
    assert said.pop() == ""
    start = said.index("/x/uv")
    assert said[0] == "env"
    assert said[start : start + 6] == [
        "/x/uv", "pip", "install", "--no-config", "--python", sys.executable,
    ]  # fmt: skip
    pairs = list(pairwise(said))
    for pair in (
        ("--extra-index-url", "https://a/simple"),
        ("--extra-index-url", "https://b/simple"),
        ("--find-links", "/w"),
        ("--find-links", "1"),
    ):
        assert pair in pairs
    assert "--no-index" in said
    refused = run(PIP_NO_DEPS="1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "pip is configured with no-deps = 1, which uv does not know\n"
