"""A process that has imported what ranks need, and forks one for each that it is asked for.

To import torch, DeepSpeed and megatron-core takes seconds, a fork takes none. What is tested is
imported by each rank anew: nothing of this project is prepared, nor anything that a rank changes.
All workers of a session share these processes. The first worker that needs one starts it, as
``python prepared.py MODULE...`` with a listening socket for its stdin, and each connection is a
request in a line of JSON, ``{"words", "environments", "outputs"}``, with ``folder`` and ``network``
where ranks are to be elsewhere than this process. A child that is forked for the
connection forks the ranks, answers with ``{"codes"}``, an exit code a rank and None for those that
were ended because another one failed, and leaves no process behind. It ends the ranks as well if
whoever asked has gone.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import socket
import sys
import tempfile
from pathlib import Path

import processes

_BASE = (
    *("torch", "numpy", "deepspeed", "torch._dynamo"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_config"),
)
"""The fourth is what the first optimizer imports, the last two what the first engine does."""
DEEPSPEED = (
    *_BASE,
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "mixtral", "switch_transformers", "t5", "vit")
    ),
    *(["lightning.pytorch"] if importlib.util.find_spec("lightning") else []),
)
MEGATRON = (
    *_BASE,
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.p2p_communication",
)
FIXED = ("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Variables that libraries read once, when they are loaded."""
_LOOK_EVERY_S = 5.0
"""So often a process that nobody asks looks whether its session still runs."""


def run(modules, words, environments, outputs):
    """Run a script as the ranks of a job; returns their exit codes.

    Args:
        modules: what is imported before the ranks are forked.
        words: the script's path and its arguments, or ``-m``, a module and its arguments.
        environments: the environment of each rank.
        outputs: the path of the file for each rank's output.
    """
    request = {"words": list(map(str, words)), "environments": environments,
               "outputs": list(map(str, outputs))}  # fmt: skip
    with _connect(modules, environments[0]) as connection, connection.makefile("rw") as file:
        file.write(json.dumps(request) + "\n")
        file.flush()
        answer = file.readline()
    assert answer, "the process that forks ranks has ended"
    return json.loads(answer)["codes"]


def variables(modules):
    """Variables by which trainers that a program starts are forked (``sitecustomize.py``).

    They get their own environment, output, folder and network; what supervises them sees the
    process in whose place they are.
    """
    with _connect(modules, {**os.environ, "OMP_NUM_THREADS": "1"}) as connection:
        address = connection.getpeername().decode()
    return {"OMP_NUM_THREADS": "1", "TESTS_FORKS": address.removeprefix("\0")}


def _connect(modules, environment):
    """Connect to the process that has imported them; start it if there is none."""
    key = json.dumps([modules, [environment.get(name) for name in FIXED]])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    address = f"\0{_folder().name}-{name}"  # of no file, so that the length of no path matters
    connection = socket.socket(socket.AF_UNIX)
    with (_folder() / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for as long as a process takes to be started
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                _start(modules, environment, listener)
            connection.connect(address)
    return connection


@functools.cache
def _folder():
    """The session's folder, whose name has the number of the process that the session is."""
    if answer := os.environ.get("TESTS_CPU_INFO"):
        return Path(answer).parent
    return Path(tempfile.mkdtemp(prefix=f"tests-{os.getpid()}-"))


def _start(modules, environment, listener):
    session = _folder().name.split("-")[1]
    command = [sys.executable, "-W", "ignore", __file__, session, *modules]
    actions = [(os.POSIX_SPAWN_DUP2, listener.fileno(), 0)]
    processes.kept.add(os.posix_spawn(sys.executable, command, environment, file_actions=actions))


def _serve(session, *modules):
    """Answer requests; returns in a forked rank alone, with its script and words."""
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):  # of another release of DeepSpeed
            importlib.import_module(name)
    _spare_the_ranks()
    listener.settimeout(_LOOK_EVERY_S)
    while Path("/proc", session).exists():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    return _answer(connection)
    os._exit(0)


def _answer(connection):
    """Answer one request and end; returns in a forked rank alone."""
    processes.adopt_orphans()
    line = connection.makefile().readline()
    if not line:  # whoever asked has gone already
        os._exit(0)
    request, ranks = json.loads(line), {}
    for rank, environment in enumerate(request["environments"]):
        if (pid := os.fork()) == 0:
            connection.close()
            _move(request.get("folder"), request.get("network"))
            _become(environment, request["outputs"][rank])
            return request["words"]
        ranks[pid] = rank
    codes = _wait(ranks, connection)
    processes.end_all()
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps({"codes": codes}).encode() + b"\n")
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


def _move(folder, network):
    """Go where whoever asked is; only root can change the network, and only root has another."""
    if folder:
        os.chdir(folder)
    if network and not Path(network).samefile("/proc/self/ns/net"):
        with Path(network).open() as file:
            assert not ctypes.CDLL(None).setns(file.fileno(), 0)


def _become(environment, output):
    """Take over what a process gets when it is started."""
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _wait(ranks, connection):
    """Wait until all have ended, one has failed, which the others might wait for in vain, or nobody
    waits for the answer."""
    codes = dict.fromkeys(ranks.values())
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        for pid in ranks:
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while None in codes.values() and not any(codes.values()):
            for key, _ in selector.select():  # as long as ranks run, which their test bounds
                if key.fileobj is connection:
                    return list(codes.values())
                selector.unregister(key.fileobj)
                _, status = os.waitpid(key.data, 0)
                codes[ranks[key.data]] = os.waitstatus_to_exitcode(status)
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
    _run_script(_serve(*sys.argv[1:]))
