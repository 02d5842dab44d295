"""A process that ends while something is under way does end, and says nothing."""

import os
import subprocess
import sys
import threading

import pytest
from ranks import run_ranks

ENDS = {
    # A thread that is in torch when Python ends would abort the process (exit code 134).
    "a lane that has work": (
        """
import torch
from deep_optimizer_states.core.device.emulated import Faults, _ThreadLane
lane = _ThreadLane("flush", Faults())
source, home = torch.ones(200_000), torch.empty(200_000)
for _ in range(2000):
    lane.submit("copy", lambda: home.copy_(source))
lane.submit("print", lambda: print("last"))
""",
        "last\n",
    ),
    # Python joins the thread that waits for tiles before it ends.
    "between backward and step": (
        """
from concurrent.futures import ThreadPoolExecutor
from deep_optimizer_states.core.update import Update
update = Update(range(2), lambda tile: (), print)
ThreadPoolExecutor(1).submit(update.take, True)
print("over", flush=True)
""",
        "over\n",
    ),
    "a forked child that has none of the pages and unmaps none of its own memory later": (
        """
import ctypes, gc, mmap, os, torch
from deep_optimizer_states.core.host import ANYWHERE
from deep_optimizer_states.core.device.cuda import take_pages

size = 2**22
pages = take_pages(size, ANYWHERE)
address = ctypes.addressof(pages)
tensor = torch.frombuffer(pages, dtype=torch.float32).fill_(3.0)
del pages
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
child = os.fork()
if child == 0:
    here = libc.mmap(
        address, size, mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1, 0,  # MAP_FIXED_NOREPLACE
    )
    assert here == address, "the child has the parent's pages"
    ctypes.memset(here, 7, size)
    del tensor
    gc.collect()
    os._exit(0 if ctypes.string_at(here, size) == b"\\7" * size else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert tensor.eq(3.0).all()
""",
        "",
    ),
}

HANGING_GPU = """
import torch
from cuda_memory import stand_in
from cuda_runtime import Point
from deep_optimizer_states.core.device.cuda import CudaDevice
stood_in = stand_in()
runtime, device = stood_in.__enter__(), CudaDevice(1)
source, home = torch.ones(64, device="cuda"), device.empty_host(64, torch.float32)
runtime.current_stream().wait_for(Point())
home.copy_(source, non_blocking=True)
"""
"""It has failed, and says so by ending: nobody calls close() then."""


def test_python_still_says_that_it_is_about_to_join_threads():
    """Its public signs come too late for a pool's thread that waits for tiles.

    ``threading.main_thread().is_alive()`` is true, and ``atexit`` has not begun, while Python joins
    the threads of pools.
    """
    assert threading._SHUTTING_DOWN is False


@pytest.mark.parametrize(("script", "says"), ENDS.values(), ids=ENDS)
def test_a_process_ends_with_something_under_way(tmp_path, script, says):
    program = tmp_path / "program.py"
    program.write_text(script)
    assert run_ranks(program, PYTHONPATH=os.pathsep.join(sys.path)) == [says]


def test_a_process_ends_with_a_gpu_that_hangs():
    """Started, and not forked: what is forked from the prepared process prints more at its end."""
    command = [sys.executable, "-W", "ignore", "-c", HANGING_GPU]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
