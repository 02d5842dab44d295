"""Piece ``sanitizer``: NVIDIA's compute-sanitizer over a few tests of the device's kernel.

``python -m benchmarks.gpu_check.sanitizer SECONDS``. memcheck finds accesses outside an array,
initcheck reads of memory that nothing wrote. Standard library alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.gpu_check.pieces import LEFT_OUT_STATUS

TOOLS = ("memcheck", "initcheck")
_FOUND_STATUS = 9
# One length below and one at a multiple of the kernel's block, with bf16 gradients.
_TESTS = ("tests/gpu/test_triton_adam.py", "-k", "(1023 or 16-) and grad_dtype1 and True")


def main(argv: Sequence[str]) -> int:
    """Run both tools; returns 1 when one of them found something or did not end."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        sys.stdout.write("* compute-sanitizer is not installed here\n")
        return LEFT_OUT_STATUS
    limit_s = float(argv[0]) / len(TOOLS)
    status = 0
    for tool in TOOLS:
        options = ("--tool", tool, "--error-exitcode", str(_FOUND_STATUS), "--print-limit", "5")
        tests = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
        command = (program, *options, sys.executable, *tests, "--timeout", str(limit_s), *_TESTS)
        try:
            code = subprocess.run(command, check=False, timeout=limit_s).returncode
            known = {0: "found nothing", _FOUND_STATUS: "FOUND ERRORS"}
            verdict = known.get(code, f"ended with status {code}")
        except subprocess.TimeoutExpired:
            code, verdict = 1, f"not done after {limit_s:.0f} s"
        sys.stdout.write(f"* {tool}: {verdict}\n")
        status |= code != 0
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
