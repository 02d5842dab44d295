"""The module that ``deep_optimizer_states run`` puts into the Python processes of a command.

Python imports the first module of this name on its path when it starts, and ``run`` puts this
folder first. DeepSpeed is waited for: once a process has imported it,
:func:`deep_optimizer_states.install` follows. A process that never does is left as it is, and the
module of this name that would have been imported otherwise is imported after all.

A process that this one starts may not come by here: Python looks at ``PYTHONPATH``, unless it is
told not to. That would be stock DeepSpeed without a word, so it is said here, by an audit hook.

Any Python may come by, one without this package too: hence the standard library alone.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing would cost every Python process an import
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_OWN_NAME = "sitecustomize"
_FOLDER = __file__.rpartition(os.sep)[0]
_STARTS = {"subprocess.Popen": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1}
"""Audit events of a process that is started, and where program and words are in their arguments;
the variables come last."""


class _InstallAfterDeepSpeed:
    """A finder that lets the others find DeepSpeed, and acts when it has been loaded."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "deepspeed":
            return None
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_install(module: "ModuleType") -> None:
                load(module)
                _install(module)

            spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _install(deepspeed: "ModuleType") -> None:
    # RuntimeErrors: programs that do without DeepSpeed where it is missing hide ImportErrors.
    try:
        import deep_optimizer_states
    except ImportError as error:
        raise RuntimeError(
            f"deep_optimizer_states cannot be imported by {sys.executable} ({error}), which `run` "
            "was to install it in: install the package there, or leave `run` out"
        ) from error
    deep_optimizer_states.install()
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"deep_optimizer_states is installed in DeepSpeed {deepspeed.__version__}: a config "
            'with an enabled "deep_optimizer_states" block gets its optimizer\n'
        )


def why_not(program: str, words: "Sequence[str]", variables: "Mapping[str, str]") -> str:
    """Say why the plugin is not installed in a process, in a line; empty if it is no Python's.

    Args:
        program: What is run.
        words: Its name and arguments.
        variables: Its environment.
    """
    if program.rpartition(os.sep)[2].rstrip("0123456789.t") != "python":
        return ""
    flag = _ignoring_flag(words)
    if flag:
        how = f"is started with {flag} and does not look at PYTHONPATH"
    elif _FOLDER not in variables.get("PYTHONPATH", "").split(os.pathsep):
        how = f"is started without {_FOLDER} in PYTHONPATH"
    else:
        return ""
    return f"deep_optimizer_states: {program} {how}, so that DeepSpeed is stock's there"


def _ignoring_flag(words: "Sequence[str]") -> str:
    """Return the flag by which Python does not import this module, if there is one."""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            break
        for at, letter in enumerate(word[1:], start=1):
            if letter in "EIS":
                return f"-{letter}"
            if letter in "cm":
                return ""
            if letter in "WX":
                if at == len(word) - 1:
                    next(rest, "")
                break
            if letter == "-":
                break
    return ""


def _tell_of_others() -> None:
    """Say of each kind of process that this one starts without the plugin, once."""
    told = set()

    def look(event: str, given: "tuple[object, ...]") -> None:
        if event not in _STARTS:
            return
        program, words = given[_STARTS[event] :][:2]
        variables = os.environ if given[-1] is None else given[-1]
        try:
            names = [os.fsdecode(word) for word in words]  # type: ignore[attr-defined]
            pairs = variables.items()  # type: ignore[attr-defined]
            decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
            reason = why_not(os.fsdecode(program or names[0]), names, decoded)  # type: ignore[arg-type]
        except (AttributeError, IndexError, TypeError, ValueError):
            return  # what cannot be started either
        if reason and reason not in told:
            told.add(reason)
            sys.stderr.write(f"{reason}\n")

    sys.addaudithook(look)


def _make_way() -> None:
    """Leave the path, and import the module that this one stands before."""
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    own = sys.modules.pop(_OWN_NAME)
    try:
        __import__(_OWN_NAME)
    except ModuleNotFoundError as error:
        if error.name != _OWN_NAME:
            raise
    finally:
        # Python looks the module up once it has been run, and fails without one.
        sys.modules.setdefault(_OWN_NAME, own)


if __name__ == _OWN_NAME:
    sys.meta_path.insert(0, _InstallAfterDeepSpeed())
    _tell_of_others()
    _make_way()
