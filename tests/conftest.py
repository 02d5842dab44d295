"""What every test needs: the environment's compiled ops, and no GPU test without a GPU."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["hub", "processes"]

# The ops that `make setup` built ahead; without it DeepSpeed would compile for minutes.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
os.environ["PATH"] = os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ["PATH"]))

# No example fails because the machine is busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

IN_GROUPS = ("engine/test_rows.py", "engine/test_trials.py")
"""Files of which workers take a group of rows each."""

# Runs on one machine take turns; those of several test workers would wait for each other.
LOCK = Path(tempfile.gettempdir()) / f"turn-{os.getpid()}.lock"
os.environ["DOS_LOCK_FILE"] = str(LOCK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give out a file at a time, of the longest ones all cases of one group of rows."""
    from xdist.scheduler import LoadFileScheduling

    class FilesAndGroups(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            # The group comes first: ``test_every_row_holds[failures-2-few]``.
            return nodeid.partition("-")[0] if file.endswith(IN_GROUPS) else file

    return FilesAndGroups(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while tests are imported, and leave what they import out of it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    LOCK.unlink(missing_ok=True)
    gc.freeze()  # pytest looks six times through all that is left, for seconds


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
