"""Spare the processes of a test session what one of them has done already.

``tests/support/processes.py`` puts this folder before all others that Python imports from. Two
kinds of processes end in this file; all others go on as if it were not there.

DeepSpeed asks py-cpuinfo for the processor's name in every process that makes a CPU optimizer. The
answer comes from a process of its own, which measures the clock by keeping a core busy for a
second. So such a process prints what the first one printed.

A trainer or torchrun that a program starts imports torch, DeepSpeed and megatron-core for seconds.
Where a test says so (``prepared.variables``), such a process has one forked in its place, which has
imported them, and ends as that one does.
"""

import os
import sys

_ANSWER = "TESTS_CPU_INFO"
"""Names the file with the answer; without it py-cpuinfo does as it always does."""
_FORKS = "TESTS_FORKS"
"""Address of the process that forks; without it each process imports for itself."""
_TRAINERS = ("launch.pretrain_gpt", "launch.pretrain_pipeline", "launch.frameworks.imdb.program")
_FORKED = (*_TRAINERS, "torch.distributed.run")


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


def _words_to_fork(words):
    words = [word for word in words[1:] if word != "-u"]  # the outputs of forked ranks are files
    return words if words[:1] == ["-m"] and words[1] in _FORKED else []


def _have_it_forked(address, words):
    import json
    import socket

    here = f"/proc/{os.getpid()}"
    network = os.open(f"{here}/ns/net", os.O_RDONLY)
    place = {"folder": os.getcwd(), "network": f"{here}/fd/{network}"}  # noqa: PTH109
    request = {"words": words, "environments": [dict(os.environ)], "outputs": [f"{here}/fd/1"]}
    _enter_the_network_of(address.split("-")[1])
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as file:
        connection.connect(f"\0{address}")
        file.write(json.dumps({**request, **place}) + "\n")
        file.flush()
        (code,) = json.loads(file.readline())["codes"]
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _enter_the_network_of(session):
    """An address without a file is known in one network alone."""
    network = f"/proc/{session}/ns/net"
    if os.stat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116
        import ctypes

        ctypes.CDLL(None).setns(os.open(network, os.O_RDONLY), 0)


if _ANSWER in os.environ and _is_the_question(sys.orig_argv):
    _print_answer(os.environ[_ANSWER])
if _FORKS in os.environ and (_words := _words_to_fork(sys.orig_argv)):
    _have_it_forked(os.environ[_FORKS], _words)
