"""What ended a run is named by its cause, once, whoever printed it and whatever came of it."""

import tomllib
from pathlib import Path

import pytest

from parse.diagnose import diagnose
from parse.illnesses import known

EXPECTED = Path(__file__).resolve().parents[2] / "golden" / "diagnose" / "expected.toml"
EXIT = "[ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = {}"
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
)
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:589] Connection closed by peer [10.0.0.2]:29500"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
STEPS = [f"step {at} loss: {2 - 0.01 * at:.4f}" for at in range(20)]


def traceback(error, *functions, file="/w/train.py"):
    """The lines of a traceback that passes through functions and ends with an error."""
    frames = [f'  File "{file}", line 7, in {name}' for name in ("<module>", *functions)]
    return ["Traceback (most recent call last):", *frames, *error.split("\n")]


def of_rank(prefix, lines):
    return [prefix + line for line in lines]


def found(tmp_path, lines):
    path = tmp_path / "run.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return diagnose(path).illnesses


def names(tmp_path, lines):
    return [illness.name for illness in found(tmp_path, lines)]


# What programs say, by the illness that it shows; each is the end of a traceback
ERRORS = {
    "op-cuda-version": [
        "Exception: Installed CUDA version 11.7 does not match the version torch was compiled with "
        "11.6, unable to compile cuda/cpp extensions without a matching cuda version.",
        "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: "
        "Installed CUDA version 12.2 does not match the version torch was compiled with 11.7, "
        "unable to compile cuda/cpp extensions without a matching cuda version.",
        "RuntimeError: \nThe detected CUDA version (11.7) mismatches the version that was used to "
        "compile\nPyTorch (12.1).",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA root.",
        "op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile ops",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
    ],
    "op-compiler": [
        "FileNotFoundError: [Errno 2] No such file or directory: 'c++'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/bin/g++-11'",
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
    ],
    "op-ninja": [
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
        "RuntimeError: Unable to JIT load the cpu_adam op due to ninja not being installed.",
    ],
    "op-of-other-libraries": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "ImportError: /w/torch_extensions/py310_cu117/cpu_adam/cpu_adam.so: cannot open shared "
        "object file: No such file or directory",
        "ImportError: /w/torch_extensions/fused_adam.so: undefined symbol: _ZN3c104cuda9SetDev",
    ],
    "op-build": [
        "RuntimeError: Error building extension 'cpu_adam'",
        "RuntimeError: Unable to JIT load the fused_adam op due to it not being compatible due to "
        "hardware/software issue.",
    ],
    "op-headers": [
        "RuntimeError: Unable to JIT load the async_io op due to it not being compatible due to "
        "hardware/software issue.",
    ],
    "disk-full": [
        "OSError: [Errno 28] No space left on device: 'out/checkpoint-100/model.safetensors'",
        "OSError: [Errno 122] Disk quota exceeded",
        "RuntimeError: [enforce fail at inline_container.cc:424] . unexpected pos 640 vs 532",
    ],
    "shared-memory": [
        "RuntimeError: unable to write to file </torch_4321_0>: No space left on device (28)",
        "RuntimeError: NCCL error\nError while creating shared memory segment /dev/shm/nccl-AbC",
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory.",
    ],
    "host-memory": [
        "RuntimeError: unable to mmap 512 bytes from file <filename not specified>: Cannot "
        "allocate memory (12)",
        "MemoryError",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.5 GiB for an array",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough "
        "memory: you tried to allocate 640 bytes.",
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. ",
    ],
    "checkpoint-of-shards": [
        "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n\tsize mismatch "
        "for q.lora_A.weight: copying a param with shape torch.Size([8, 64]) from checkpoint, the "
        "shape in current model is torch.Size([0]).",
        "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for wte.weight: "
        "copying a param with shape torch.Size([0]) from checkpoint, the shape in current model "
        "is torch.Size([64, 8]).",
    ],
    "checkpoint-mismatch": [
        "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for wte.weight: "
        "copying a param with shape torch.Size([64, 8]) from checkpoint, the shape in current "
        "model is torch.Size([65, 8]).",
        "RuntimeError: Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: w",
        "AssertionError: num_layers value from checkpoint (24) is not equal to the input argument "
        "value (12).",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size",
    ],
    "ids-beyond-vocabulary": [
        "IndexError: index out of range in self",
        "IndexError: Target 7 is out of bounds.",
    ],
    "device-fault": [
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: unknown error",
    ],
    "batch-sizes": [
        "AssertionError: global batch size (16) is not divisible by micro batch size (3) times "
        "data parallel size (4)",
    ],
    "device-memory": [
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        OUT_OF_MEMORY,
    ],
    "overflow-every-step": [
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore.",
    ],
    "port-in-use": [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE",
        "RuntimeError: Address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
    "page-locked-memory": [
        "RuntimeError: Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    ],
    "settings-mismatch": [
        "ValueError: Please correct the following DeepSpeed config values that mismatch "
        "TrainingArguments values:\n- ds gradient_clipping=0.5 vs hf max_grad_norm=1.0",
    ],
    "norm-nan": ["AssertionError: Rank 3: found NaN in local grad norm in backward pass before"],
    "loss-nan": ["AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 0"],
    "collective-timeout": [
        "torch.distributed.DistStoreError: Timed out after 5 seconds waiting for clients.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while "
        "trying to connect to (10.0.0.1, 29500).",
    ],
    "rank-lost": [
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving "
        "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
        "Connection reset by peer",
        LOST,
        "torch.distributed.DistBackendError: NCCL communicator was aborted on 1.",
    ],
    "stopped-from-outside": ["KeyboardInterrupt"],
    "unknown-failure": [
        "Exception: no such thing",
        "ValueError: zip() argument 2 is longer than argument 1",
        "huggingface_hub.errors.GatedRepo: 401",
    ],
}


@pytest.mark.parametrize(
    ("name", "error"), [(name, error) for name, errors in ERRORS.items() for error in errors]
)
def test_an_error_is_named_once_behind_any_prefix(tmp_path, name, error):
    lines = traceback(error, "load")
    assert names(tmp_path, [*lines, EXIT.format(1)]) == [name]
    for prefix in (
        "[rank1]: ",
        "192.168.0.7: ",
        "[default0]:[rank0]: ",
        "2026-01-01T00:00:00Z 3: ",
    ):
        illness, *others = found(tmp_path, [*of_rank(prefix, lines), EXIT.format(1)])
        assert (illness.name, others) == (name, [])
        assert illness.evidence.startswith(prefix.rpartition("Z ")[2])


# What stands before the last error of a traceback, or without any
LINES = {
    "op-compiler": ["/bin/sh: 1: c++: not found", "host.h:9: error: -- unsupported GNU version! "
                    "gcc versions later than 11 are not supported!",
                    "std_function.h:435:145: error: parameter packs not expanded with '...':"],
    "op-headers": ["cpu_adam.cpp:6:10: fatal error: Python.h: No such file or directory",
                   "/usr/bin/ld: cannot find -lcurand: No such file or directory"],
    "op-cuda-version": ["/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found",
                        "nvcc fatal   : Unsupported gpu architecture 'compute_90'"],
    "host-memory": ["c++: fatal error: Killed signal terminated program cc1plus"],
}  # fmt: skip
BEFORE_ANY_RANK = {
    "host-not-reached": ["ssh: connect to host n2 port 22: Connection refused",
                         "Host key verification failed."],
    "port-in-use": ["[E socket.cpp:500] [c10d] The server socket has failed to listen on any local "
                    "network address."],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines]
)
def test_why_an_op_could_not_be_built_is_named_and_not_what_came_of_it(tmp_path, name, line):
    ninja = traceback("subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero "
                      "exit status 1.")  # fmt: skip
    build = traceback("RuntimeError: Error building extension 'cpu_adam'")
    after = traceback("AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'")
    ignored = "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f120f45ed30>"
    lines = [line, "ninja: build stopped: subcommand failed.", *ninja, *build, ignored, *after]
    assert names(tmp_path, [*lines, EXIT.format(1)]) == [name]
    assert names(tmp_path, [ignored, *after, EXIT.format(1)]) == ["op-build"]


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in BEFORE_ANY_RANK.items() for line in lines]
)
def test_what_keeps_ranks_from_starting_is_named_before_the_launcher_s_exit(tmp_path, name, line):
    lines = [f"n2: {line}", "pdsh@n1: n2: ssh exited with exit code 255"]
    assert [(one.name, one.line) for one in found(tmp_path, lines)] == [(name, 1)]


def test_a_group_of_errors_is_an_error(tmp_path):
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "t.py", line 3, in main',
        "  | ExceptionGroup: in a TaskGroup (1)",
        "    | ValueError: bad",
    ]
    assert names(tmp_path, lines) == ["unknown-failure"]


def test_a_compiler_that_was_only_tried_out_is_not_told(tmp_path):
    tried = [line for name in ("op-headers", "op-compiler") for line in LINES[name]]
    assert names(tmp_path, [*tried, *traceback("KeyError: 'text'"), EXIT.format(1)]) == [
        "unknown-failure"
    ]


def test_an_error_of_a_thread_is_told_where_nothing_else_is(tmp_path):
    of_thread = ["Exception in thread Thread-1 (_loop):", *traceback("OSError: [Errno 9] Bad")]
    assert names(tmp_path, of_thread) == ["unknown-failure"]
    (illness,) = found(tmp_path, [*of_thread, *traceback("KeyError: 'text'")])
    assert illness.evidence == "KeyError: 'text'"


def test_every_illness_is_seen_in_some_log_and_has_a_remedy():
    logs = tomllib.loads(EXPECTED.read_text())
    seen = {name for table in logs.values() for found in table.values() for name in found}
    assert known().keys() == seen | ERRORS.keys() | LINES.keys() | BEFORE_ANY_RANK.keys() | {
        "eval-loss-nan", "scheduler-groups", "device-memory-gradients", "loss-unstable",
    }  # fmt: skip
    assert all(kind.remedy.endswith(".") for kind in known().values())


@pytest.mark.parametrize("host", ["", "node-1: "])
def test_a_traceback_may_begin_behind_a_progress_bar(tmp_path, host):
    first, *others = of_rank("[rank0]: ", traceback("ValueError: bad sample", "load"))
    lines = [f" 10%|#   | 10/100 [00:01<00:09,  9.9it/s]{first}", *others]
    assert names(tmp_path, of_rank(host, lines)) == ["unknown-failure"]


def test_a_scheduler_is_told_by_where_the_error_came_from(tmp_path):
    error = "ValueError: zip() argument 2 is longer than argument 1"
    lines = traceback(error, "_update_lr", file="/w/torch/optim/lr_scheduler.py")
    assert names(tmp_path, of_rank("[rank0]: ", lines)) == ["scheduler-groups"]


@pytest.mark.parametrize(
    "words",
    [
        ["no errors, error rate 0.1", "Killing subprocess 12", "0 errors, exit status 0"],
        [
            "Exception ignored in: <function Pool.__del__ at 0x7f>",
            *traceback("TypeError: 'NoneType' object is not callable", "__del__"),
        ],
        ["Error in atexit._run_exitfuncs:", *traceback("OSError: [Errno 9] Bad file descriptor")],
        ["Installed CUDA version 12.2 does not match the version torch was compiled with 12.1 but "
         "since the APIs are compatible, accepting this combination"],
        ["[WARNING] async_io requires the dev libaio .so object and headers but these were not "
         "found."],
        ["subprocess.CalledProcessError: Command 'git' returned non-zero exit status 128."],
        ["[W socket.cpp:464] [c10d] The server socket has failed to bind to 0.0.0.0:29500 (errno: "
         "98 - Address already in use)."],
        ["1: step 20 loss: 1.8", "0: step 20 loss: 1.8"],
        ["'train_runtime': 12.5", "[W1 TCPStore.cpp:125] [c10d] recvValue failed: Connection "
         "reset by peer", LOST],
        ["--- Logging error ---", *traceback("TypeError: not all arguments converted")],
        ["'train_runtime': 12.5", "Exception in thread Thread-3:",
         *traceback("ConnectionError: no route")],
    ],
)  # fmt: skip
def test_words_of_good_logs_are_no_errors(tmp_path, words):
    assert names(tmp_path, [*STEPS, *words]) == []


def test_an_error_that_training_went_on_after_is_not_told(tmp_path):
    failed = traceback("ValueError: bad sample", "load")
    counted = [f"[INFO] [Rank 0] step={at}, skipped=0, lr=[0.1], mom=[0.9]" for at in (10, 20, 30)]
    assert names(tmp_path, [*failed, *STEPS]) == []
    assert names(tmp_path, [*failed, *counted]) == []
    assert names(tmp_path, [*STEPS, *failed]) == ["unknown-failure"]
    lines = [*failed, *STEPS, *traceback("KeyError: 'text'")]
    assert [one.line for one in found(tmp_path, lines)] == [len(lines)]


# Several ranks
CRASH = traceback("ValueError: bad sample", "load")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([*of_rank("[rank0]: ", CRASH), TIMEOUT], "unknown-failure"),
        ([TIMEOUT, *of_rank("[rank0]: ", CRASH)], "collective-timeout"),
        ([TIMEOUT, *of_rank("0: ", traceback(OUT_OF_MEMORY, "forward"))],
         "device-memory-activations"),
        ([*of_rank("1: ", traceback(LOST)), *of_rank("0: ", CRASH)], "unknown-failure"),
        ([*of_rank("1: ", traceback(LOST)), EXIT.format(-9)], "host-memory"),
        ([*of_rank("1: ", traceback(LOST)), EXIT.format(1)], "rank-lost"),
        ([TIMEOUT, "failed (exitcode: -6) local_rank: 1", *traceback(TORCHRUN),
          "  exitcode  : -9 (pid: 33)"], "collective-timeout"),
        ([*CRASH, *traceback(TORCHRUN)], "unknown-failure"),
        ([*of_rank("0: ", CRASH), *of_rank("1: ", traceback("KeyboardInterrupt"))],
         "unknown-failure"),
        (["[Rank 0] Assertion `srcIndex < srcSelectDimSize` failed.",
          *traceback("RuntimeError: CUDA error: device-side assert triggered"), EXIT.format(-6)],
         "ids-beyond-vocabulary"),
        (["*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
          "srun: error: n1: task 0: Killed"], "stopped-from-outside"),
    ],
)  # fmt: skip
def test_the_first_error_is_the_cause_and_what_follows_from_it_is_not_told(tmp_path, lines, name):
    assert names(tmp_path, lines) == [name]


def test_running_out_of_memory_on_several_ranks_is_one_illness(tmp_path):
    inner = ("forward", "reduce_ipg_grads", "forward", "save_checkpoint")
    lines = [
        line
        for rank, name in enumerate(inner)
        for line in of_rank(f"[rank{rank}]: ", traceback(OUT_OF_MEMORY, "backward", name))
    ]
    (illness,) = found(tmp_path, [*lines, *traceback(TORCHRUN), EXIT.format(1)])
    assert illness.name == "device-memory-activations"
    assert "(4 such lines)" in illness.evidence


@pytest.mark.parametrize(
    "inner", ["copy_grads_in_partition", "async_accumulate_grad_in_cpu_via_gpu"]
)
def test_the_store_of_gradients_is_not_activations(tmp_path, inner):
    outer = ("backward", "reduce_ready_partitions_and_remove_grads", "reduce_ipg_grads")
    lines = traceback(OUT_OF_MEMORY, *outer, inner)
    assert names(tmp_path, lines) == ["device-memory-gradients"]


# Exit codes
def memory_in_use(percent):
    return f"CPU Virtual Memory:  used = {5.12 * percent:.2f} GB, percent = {percent:.1f}%"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([EXIT.format(-9)], "host-memory"),
        ([memory_in_use(97), EXIT.format(-9)], "host-memory"),
        ([memory_in_use(3), EXIT.format(-9)], "stopped-from-outside"),
        ([memory_in_use(3), *STEPS, EXIT.format(-9)], "stopped-from-outside"),
        ([memory_in_use(40), EXIT.format(-9)], "host-memory"),
        ([*STEPS, memory_in_use(40), EXIT.format(-9)], "stopped-from-outside"),
        ([*STEPS, memory_in_use(40), "Saving model checkpoint to out", EXIT.format(-9)],
         "host-memory"),
        (["Loading checkpoint shards: 100%", memory_in_use(3), EXIT.format(-9)],
         "stopped-from-outside"),
        (["bash: line 1:  4242 Killed   deepspeed train.py"], "host-memory"),
        ([memory_in_use(3), "bash: line 1:  4242 Killed   deepspeed train.py"],
         "stopped-from-outside"),
        (["n1: srun: error: n1: task 3: Killed"], "host-memory"),
        (["  traceback : Signal 9 (SIGKILL) received by PID 501"], "host-memory"),
        (traceback("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>."),
         "host-memory"),
        (["Exit Code: 137"], "host-memory"),
        ([EXIT.format(-7)], "shared-memory"),
        (["Bus error (core dumped)"], "shared-memory"),
        (["failed (exitcode: -7) local_rank: 0", *traceback(TORCHRUN)], "shared-memory"),
        ([EXIT.format(-4)], "op-of-other-libraries"),
        (["Illegal instruction (core dumped)"], "op-of-other-libraries"),
        ([EXIT.format(-15)], "stopped-from-outside"),
        (["exitcode  : 1 (pid: 7)", "exitcode  : -15 (pid: 8)"], "unknown-failure"),
        (["exitcode  : -15 (pid: 7)", "exitcode  : 1 (pid: 8)"], "unknown-failure"),
        ([*CRASH, EXIT.format(-9)], "unknown-failure"),
        ([EXIT.format(-11)], "unknown-failure"),
        ([*STEPS, "[after training is done]", EXIT.format(-11)], "abort-at-exit"),
        (["[rank: 1] Child process with PID 8 terminated with code 1. Forcefully"],
         "unknown-failure"),
        (traceback(TORCHRUN), "unknown-failure"),
    ],
)  # fmt: skip
def test_an_exit_code_is_read_where_no_error_was_printed(tmp_path, lines, name):
    (illness,) = found(tmp_path, lines)
    assert illness.name == name
    if memory_in_use(3) in lines:
        assert "percent = 3.0%" in illness.evidence


# Ops that are built
def build(prefix="", version=""):
    return f"{prefix}[1/2] c++ -MMD -MF a.o.d -DTORCH_EXTENSION_NAME=cpu_adam{version} -c a.cpp"


@pytest.mark.parametrize(
    ("lines", "is_again"),
    [
        ([build("node-1: "), build("node-2: "), *STEPS], False),
        ([build(), build(), *STEPS], False),
        ([build("node-1: "), build("node-1: "), *STEPS], True),
        ([build(), build(version="_v1"), *STEPS], True),
        ([build(), *STEPS, build()], True),
    ],
)
def test_an_op_is_built_again_where_it_is_the_same_machine_s(tmp_path, lines, is_again):
    assert names(tmp_path, lines) == ["ops-recompile"] * is_again
