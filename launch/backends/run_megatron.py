"""Runs a checkout of Megatron-DeepSpeed in this process: ``DIR FLAG...``, under any launcher.

DIR is the checkout, the flags are those of its ``pretrain_gpt.py``. Where the DeepSpeed config they
name asks for our plugin, it is installed first. Standard library alone, and started by its path:
the checkout's package ``megatron`` must not meet megatron-core's, nor its folders ours.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

SCRIPT = "pretrain_gpt.py"
CONFIG_FLAG = "--deepspeed_config"
BLOCK = "deep_optimizer_states"


def main(arguments: list[str]) -> None:
    """Run the checkout's script; its exceptions and its exit code are ours."""
    directory, flags = Path(arguments[0]), arguments[1:]
    # Not the folder of this file, which holds the harness's own modules.
    sys.path[0] = str(directory)
    if "LOCAL_WORLD_SIZE" in os.environ:
        # DeepSpeed's launcher sets it; on CPUs it is the number of devices.
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    # What Megatron-DeepSpeed imports at its start, uses for no GPT, and may be missing: DeepSpeed
    # dropped its compression in 0.19.7; torchvision is for models of pictures.
    _stand_in("deepspeed.compression.compress", init_compression=_refuse, redundancy_clean=_refuse)
    _stand_in("torchvision.transforms")
    _stand_in("torchvision.datasets", VisionDataset=object)
    if _asks_for_plugin(flags):
        # Not imported for stock DeepSpeed: what is compared with must not depend on it.
        from deep_optimizer_states import install

        install()
    if "LOCAL_RANK" in os.environ and not any(
        flag.replace("-", "_").startswith("__local_rank") for flag in flags
    ):
        # torchrun says it in the environment alone; the script takes 0 without the flag.
        flags = [*flags, f"--local_rank={os.environ['LOCAL_RANK']}"]
    script = str(directory / SCRIPT)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        # Without this a process now and then ends in SIGABRT after good work.
        dist.barrier()
        dist.destroy_process_group()


def _asks_for_plugin(flags: list[str]) -> bool:
    if CONFIG_FLAG not in flags:
        return False
    path = Path(flags[flags.index(CONFIG_FLAG) + 1])
    block = json.loads(path.read_text(encoding="utf-8")).get(BLOCK, {})
    return bool(block.get("enabled", False))


def _stand_in(name: str, **attributes: object) -> None:
    """Make a module with these attributes, and the packages above it, where it cannot be had."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # the latter from a torchvision built for another torch
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = module = types.ModuleType(path)
                module.__path__ = []
                module.__spec__ = ModuleSpec(path, None, is_package=True)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        sys.modules[name].__dict__.update(attributes)


def _refuse(*_arguments: object, **_options: object) -> None:
    raise NotImplementedError("this version of DeepSpeed has no compression")


if __name__ == "__main__":
    main(sys.argv[1:])
