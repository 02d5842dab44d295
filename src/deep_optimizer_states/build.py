"""Build every compiled op ahead of the first run: ``python -m deep_optimizer_states.build``.

DeepSpeed compiles its CPUAdam on first use, for a minute or two in the middle of a job; ours takes
about a second. Both land in ``$TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import sys

from deep_optimizer_states.adapter.guard import check_deepspeed
from deep_optimizer_states.core.kernels import host
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.op_locks import locks_of_ops


def main() -> int:
    """Build, check that both give the same bits, and say where they are.

    A lock that another build may hold is named, and waited for unless it is old.

    Returns:
        Exit code: 0, or 1 with the reason on standard error.
    """
    try:
        check_deepspeed()
        sys.stderr.write("op 1 of 2: our host Adam, seconds\n")
        library = host.build()
        sys.stderr.write("op 2 of 2: DeepSpeed's cpu_adam, a minute or more the first time\n")
        locks = locks_of_ops(library.parent.parent)
        for lock in locks:
            sys.stderr.write(f"{lock}\n")
        if any(lock.is_old for lock in locks):
            return 1
        from deep_optimizer_states.adapter.stock_adam import tail_of_fresh_op

        tail = tail_of_fresh_op()
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"host Adam: {library.name}, equal to DeepSpeedCPUAdam ({tail})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
