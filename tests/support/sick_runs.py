"""Makes the logs of ``tests/golden/diagnose/caused``: ``python tests/support/sick_runs.py [NAME]``.

Each is what a small job of ``sick_programs.py`` printed while it really fell ill; paths of the
machine and uninteresting lines are left out. It takes some minutes; tests read the logs it made.
"""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "golden" / "diagnose" / "caused"
BIN = Path(sys.executable).parent
TIMEOUT_S = 240
MOST_BYTES = 7_500
ALONE = ["{python}", "{program}"]
TORCHRUN = ["{bin}/torchrun", "--nproc-per-node", "2", "--master-port", "{port}", "{program}"]
LAUNCHER = ["{bin}/deepspeed", "--num_gpus", "1", "--master_port", "{port}", "{program}"]
IN_OWN_PROCESSES = ["unshare", "--fork", "--pid", "--mount-proc"]
WITH_SMALL_SHM = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
SMALL_SHM = ["unshare", "--mount", "sh", "-c", WITH_SMALL_SHM, "-"]
RUNS = {
    "ds_overflow_min": ALONE, "ds_overflow_high": ALONE, "ds_norm_nan": ALONE,
    "ds_loss_nan": ALONE, "ds_frozen": ALONE, "ds_diverging": ALONE, "ds_clip_always": ALONE,
    "ds_clip_never": ALONE, "ds_step_over_half": ALONE, "ds_buckets": ALONE,
    "ds_batch_sizes": ALONE, "ds_micro_batch_zero": ALONE,
    "ds_cannot_allocate": ALONE, "memory_error": ALONE,
    "killed": [*IN_OWN_PROCESSES, *LAUNCHER], "killed_at_setup": [*IN_OWN_PROCESSES, *TORCHRUN],
    "abort_at_exit": [*IN_OWN_PROCESSES, *LAUNCHER], "collective_timeout": TORCHRUN,
    "rank_missing": ALONE, "experts": TORCHRUN, "recompiles": ALONE, "ops_recompile": ALONE,
    "threads_of_loader": ALONE, "threads_of_openmp": ALONE, "one_thread_for_offload": TORCHRUN,
    "unknown_failure": ALONE, "shared_memory": [*SMALL_SHM, *ALONE],
    "hf_nan": ALONE, "hf_norm_nan": ALONE, "hf_nan_unfiltered": ALONE, "hf_frozen": ALONE,
    "hf_diverging": ALONE, "hf_clip_always": ALONE, "hf_overflow": ALONE,
    "hf_overflow_silent": ALONE,
    "lightning_nan": ALONE, "lightning_frozen": ALONE, "lightning_diverging": ALONE,
    "ds_healthy": ALONE, "ds_healthy_fp16": ALONE, "hf_healthy": ALONE, "lightning_healthy": ALONE,
    "lightning_rich": ALONE,
}  # fmt: skip
if "DEEPSPEED_0_18" in os.environ:
    RUNS["dropped_gradients"] = ALONE
DULL = re.compile(
    r"see_memory_usage|^MA |^CPU Virtual|^Engine (?:before|after)|^<TIMER|_microstep: |timer\.py|"
    r"pin_memory_tracker|init_optimizer_state|DeepSpeed Engine: |optimizer_step: |print_user_conf|"
    r"config\.py:\d+:print\]   (?!gradient_|zero_[oc])|"
    r"^\s+\"(?!stage|device|gradient_|reduce_|allgather_|offload)|^\s+self\.|^[*\s}]*$|Distutils|"
    r"warnings\.warn|^\s*import|pkg_resources|Total|params |Modules in|cdb=None|TorchBackend|"
    r"[Ff]lops|mesh_device|distributed groups|lr_scheduler|LR [Ss]cheduler|TorchCheckpointEngine|"
    r"Basic Optimizer|basic [oO]ptimizer|is_zero_supported|Flattening|optimizer state init"
)


def run(name, number):
    """Run one job; writes its log."""
    words = {
        "python": sys.executable,
        "program": str(HERE / "sick_programs.py"),
        "bin": str(BIN),
        "port": str(29700 + number),
    }
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": words["port"], "PYTHONUNBUFFERED": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "COLUMNS": "120",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    if "torchrun" in RUNS[name][0] or "torchrun" in RUNS[name][-2]:
        del environment["OMP_NUM_THREADS"]
    command = [word.format(**words) if "$" not in word else word for word in RUNS[name]]
    done = subprocess.Popen(
        [*command, name], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
    )  # fmt: skip
    try:
        text, _ = done.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)
        text, _ = done.communicate()
    path = LOGS / f"{name}.log"
    path.write_text(without_machine(text), encoding="utf-8")
    return f"{name}: exit code {done.returncode}, {path.stat().st_size} bytes"


def without_machine(text):
    """Without paths of this machine and what no reader of the log needs."""
    text = re.sub(r"(/[\w.+-]+)+/site-packages", "/opt/venv/site-packages", text)
    text = text.replace(str(HERE), "/home/user/job").replace(str(BIN), "/opt/venv/bin")
    text = re.sub(r"/usr/(?:local/)?lib/python[\d.]+", "/usr/lib/python3", text)
    text = text.replace(str(Path.home()), "/home/user").replace(os.uname().nodename, "host")
    text = re.sub(r"/\S*torch_extensions/", "/home/user/.cache/torch_extensions/", text)
    text = re.sub(r"/tmp/\w+", "/home/user/build", text)
    lines = [line[:3000] for line in re.split(r"[\r\n]+", text) if not DULL.search(line)]
    kept = [line for at, line in enumerate(lines) if at == 0 or line != lines[at - 1]]
    while sum(len(line.encode()) + 1 for line in kept) > MOST_BYTES:
        del kept[len(kept) // 2]
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    LOGS.mkdir(parents=True, exist_ok=True)
    names = sys.argv[1:] or list(RUNS)
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(run, names, (list(RUNS).index(name) for name in names)):
            print(line, flush=True)
