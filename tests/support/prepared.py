"""A process that has imported what ranks need, and forks one for each that it is asked for.

To import torch, DeepSpeed and megatron-core takes seconds, a fork takes none. What is tested is
imported by each rank anew: nothing of this project is prepared, nor anything that a rank changes.
``python prepared.py MODULE...`` reads a request a line, ``{"id", "words", "environments",
"outputs"}``, and answers it with ``{"id", "codes"}``, an exit code a rank; None for those that were
ended because another one failed.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time

import processes

_BASE = ("torch", "numpy", "deepspeed", "torch._dynamo")
"""The last is what the first optimizer imports."""
DEEPSPEED = (
    *_BASE,
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "mixtral", "switch_transformers", "t5", "vit")
    ),
)
MEGATRON = (
    *_BASE,
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.p2p_communication",
)
FIXED = ("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that libraries read once, when they are loaded."""
_servers = {}


def run(modules, words, environments, outputs):
    """Run a script as the ranks of a job; returns their exit codes.

    Args:
        modules: what is imported before the ranks are forked.
        words: the script's path and its arguments, or ``-m``, a module and its arguments.
        environments: the environment of each rank.
        outputs: the path of the file for each rank's output.
    """
    fixed = tuple(environments[0].get(name) for name in FIXED)
    server = _servers.get((modules, fixed))
    if server is None or server.poll() is not None:
        server = _servers[modules, fixed] = _start(modules, environments[0])
    request = {"id": time.monotonic_ns(), "words": list(map(str, words)),
               "environments": environments, "outputs": list(map(str, outputs))}  # fmt: skip
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    for line in server.stdout:
        answer = json.loads(line)
        if answer["id"] == request["id"]:
            return answer["codes"]
    raise AssertionError(f"the process that forks ranks ended with {server.wait()}")


def _start(modules, environment):
    command = [sys.executable, "-W", "ignore", __file__, *modules]
    server = subprocess.Popen(command, env=environment, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    processes.kept.add(server.pid)
    atexit.register(_end, server)
    return server


def _end(server):
    server.kill()
    server.stdin.close()
    server.stdout.close()
    server.wait()


def _serve(modules):
    """Answer requests; returns in a forked rank alone, with its script and words."""
    answers, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what is printed while modules are imported is no answer
    for name in modules:
        importlib.import_module(name)
    _spare_the_ranks()
    for line in requests:
        request = json.loads(line)
        ranks = {}
        for rank, environment in enumerate(request["environments"]):
            if (pid := os.fork()) == 0:
                requests.close()
                answers.close()
                _become(environment, request["outputs"][rank])
                return request["words"]
            ranks[pid] = rank
        answers.write(json.dumps({"id": request["id"], "codes": _wait(ranks)}) + "\n")
        answers.flush()
    os._exit(0)


def _spare_the_ranks():
    """Do once what DeepSpeed does in each rank and for each engine, to the same end."""
    if "deepspeed" in sys.modules:
        # The processor's name takes a process of its own.
        cpuinfo = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()
    # DeepSpeed collects garbage often, and would look through all that was imported each time.
    gc.collect()
    gc.freeze()


def _become(environment, output):
    """Take over what a process gets when it is started."""
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _wait(ranks):
    """Wait until all have ended or one has failed, which the others might wait for in vain."""
    codes = dict.fromkeys(ranks.values())
    while None in codes.values() and not any(codes.values()):
        pid, status = os.waitpid(-1, 0)
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
    for pid, rank in ranks.items():
        if codes[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return list(codes.values())


def _run_script(words):
    """Do as ``python SCRIPT WORD...`` or ``python -m MODULE WORD...`` would."""
    folders = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[:0] = folders
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[:0] = [os.path.dirname(words[0]), *folders]  # noqa: PTH120
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run_script(_serve(sys.argv[1:]))
