"""What every test needs: the environment's compiled ops, and no GPU test without a GPU."""

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

# Runs on one machine take turns; those of several test workers would wait for each other.
LOCK = Path(tempfile.gettempdir()) / f"turn-{os.getpid()}.lock"
os.environ["DOS_LOCK_FILE"] = str(LOCK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give out a file at a time, or a part of one that is marked ``xdist_group``."""
    from xdist.scheduler import LoadGroupScheduling

    class FilesAndGroups(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            group = super()._split_scope(nodeid)
            return group.partition("::")[0]

    return FilesAndGroups(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_unconfigure():
    LOCK.unlink(missing_ok=True)


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
