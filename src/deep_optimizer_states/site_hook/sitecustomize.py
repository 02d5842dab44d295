"""The module that ``deep_optimizer_states run`` puts into every Python process of a command.

Python imports the first module of this name on its path when it starts, and ``run`` puts this
folder first. DeepSpeed is waited for: once a process has imported it,
:func:`deep_optimizer_states.install` follows. A process that never does is left as it is, and the
module of this name that would have been imported otherwise is imported after all.

Any Python may come by, one without this package too: hence the standard library alone.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing would cost every Python process an import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_OWN_NAME = "sitecustomize"


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


def _make_way() -> None:
    """Leave the path, and import the module that this one stands before."""
    folder = __file__.rpartition(os.sep)[0]
    sys.path[:] = [entry for entry in sys.path if entry != folder]
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
    _make_way()
