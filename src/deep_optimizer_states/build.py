"""Build every compiled op ahead of the first run: ``python -m deep_optimizer_states.build``.

DeepSpeed compiles its CPUAdam on first use, for a minute in the middle of a job; ours takes about a
second. Both land in ``$TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
        sys.stderr.write("op 2 of 2: DeepSpeed's cpu_adam, half a minute or more the first time\n")
        locks = locks_of_ops(library.parent.parent)
        for lock in locks:
            sys.stderr.write(f"{lock}\n")
        if any(lock.is_old for lock in locks):
            return 1
        from deep_optimizer_states.adapter.stock_adam import tail_of_fresh_op

        with _quick_compiler(library.parent):
            tail = tail_of_fresh_op()
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"host Adam: {library.name}, equal to DeepSpeedCPUAdam ({tail})\n")
    return 0


# What the op's sources use of torch/extension.h. The rest of it, the C++ frontend, is most of what
# the compiler would read.
_FEWER_HEADERS = """\
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}
"""


@contextlib.contextmanager
def _quick_compiler(folder: Path) -> Iterator[None]:
    """Spare the compiler headers and debug information that the op does not need.

    The instructions of Adam are the same. Sources that need more are compiled with all headers.
    ninja's command stays the same to the letter, because DeepSpeed builds again after it has
    changed; a system's header is none of the files after whose change ninja builds again.
    """
    compiler, path = shutil.which("c++"), os.environ.get("PATH", os.defpath)
    if compiler is None or "CXX" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(dir=folder) as first:
        header = Path(first, "torch", "extension.h")
        header.parent.mkdir()
        header.write_text(_FEWER_HEADERS)
        compiler, headers = shlex.quote(compiler), shlex.quote(first)
        wrapper = Path(first, "c++")
        wrapper.write_text(
            f"#!/bin/sh\ncase \" $* \" in *' -c '*)"
            f' {compiler} -isystem {headers} "$@" -g0 2>/dev/null && exit ;;\nesac\n'
            f'exec {compiler} "$@" -g0\n'
        )
        wrapper.chmod(0o755)
        os.environ["PATH"] = os.pathsep.join((first, path))
        try:
            yield
        finally:
            os.environ["PATH"] = path


if __name__ == "__main__":
    sys.exit(main())
