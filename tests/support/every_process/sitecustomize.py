"""Answer py-cpuinfo's question about this machine once for all processes of a test session.

DeepSpeed asks py-cpuinfo for the processor's name in every process that makes a CPU optimizer. The
answer comes from a process of its own, which measures the clock by keeping a core busy for a
second. ``tests/support/processes.py`` puts this folder before all others that Python imports from,
so that such a process prints what the first one printed. All other processes go on as if this file
were not there.
"""

import os
import sys

_ANSWER = "TESTS_CPU_INFO"
"""Names the file with the answer; without it py-cpuinfo does as it always does."""


def _is_the_question(words):
    return len(words) == 3 and words[1].endswith("cpuinfo.py") and words[2] == "--json"


def _print_answer(name):
    import subprocess
    from pathlib import Path

    path = Path(name)
    if not path.exists():
        environment = {name: value for name, value in os.environ.items() if name != _ANSWER}
        told = subprocess.run(sys.orig_argv, env=environment, stdout=subprocess.PIPE, check=False)
        if told.returncode:
            sys.exit(told.returncode)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_bytes(told.stdout)
        new.replace(path)
    sys.stdout.buffer.write(path.read_bytes())
    sys.stdout.flush()
    os._exit(0)


if _ANSWER in os.environ and _is_the_question(sys.orig_argv):
    _print_answer(os.environ[_ANSWER])
