"""Build every compiled op ahead of the first run: ``python -m deep_optimizer_states.build``.

DeepSpeed compiles its CPUAdam on first use, for a minute or two in the middle of a job; ours takes
about a second. Both land in ``$TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import sys

from deep_optimizer_states.deepspeed_guard import check_deepspeed
from deep_optimizer_states.errors import DeepOptimizerStatesError, KernelError
from deep_optimizer_states.kernels import host
from deep_optimizer_states.stale_locks import clear_stale_locks, locks_watched


def main() -> int:
    """Build, check that both give the same bits, and say where they are.

    Returns:
        Exit code: 0, or 1 with the reason on standard error.
    """
    try:
        check_deepspeed()
        sys.stderr.write("op 1 of 2: our host Adam, seconds\n")
        library = host.build()
        sys.stderr.write("op 2 of 2: DeepSpeed's cpu_adam, a minute or more the first time\n")
        folder = library.parent.parent
        for line in clear_stale_locks(folder):
            _say(line)
        with locks_watched(folder, _say):
            tail = _compare_with_deepspeed()
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"host Adam: {library.name}, equal to DeepSpeedCPUAdam ({tail})\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _compare_with_deepspeed() -> object:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from torch import zeros
    from torch.nn import Parameter

    from deep_optimizer_states.kernels.calibrate_tail import find_tail

    try:
        optimizer = DeepSpeedCPUAdam([Parameter(zeros(1))])
    except RuntimeError as error:
        raise KernelError(
            f"DeepSpeed's cpu_adam op did not build ({error.__cause__ or error}); it needs a C++ "
            "compiler, ninja and Python's headers (python3-dev on Debian)"
        ) from error
    except OSError as error:
        # torch locks an op in its folder whenever it loads it, built or not.
        raise KernelError(
            f"DeepSpeed's cpu_adam op cannot be loaded from {error.filename}: {error.strerror}; "
            "name a folder that you can write in TORCH_EXTENSIONS_DIR"
        ) from error
    return find_tail(optimizer)


if __name__ == "__main__":
    sys.exit(main())
