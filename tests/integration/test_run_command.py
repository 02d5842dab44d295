"""``python -m deep_optimizer_states run``: programs that do not know the plugin train with it."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from deep_optimizer_states.run import HOOK, environment, main
from launch.launchers import free_port

RUN = [sys.executable, "-m", "deep_optimizer_states", "run"]
USES = "deep_optimizer_states: this engine uses the plugin"
INSTALLED = "deep_optimizer_states is installed in DeepSpeed"
WORKERS = Path(__file__).with_name("frameworks")
FAKE_DEEPSPEED = '__version__ = "0.1"\n'


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on Python's path, and what starts a command with it there."""

    def start(*words, **variables):
        others = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, [str(tmp_path), others]))
        return subprocess.run(
            [str(word) for word in words],
            env={**os.environ, "PYTHONPATH": path, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return tmp_path, start


def test_a_process_without_deepspeed_is_as_it_was(elsewhere):
    _, start = elsewhere
    code = "import sys; print(sys.path, sorted({*sys.modules, 'sitecustomize'}), sys.argv)"
    with_it = start(*RUN, sys.executable, "-c", code, "an argument")
    without = start(sys.executable, "-c", code, "an argument")
    assert with_it.stdout == without.stdout
    assert "an argument" in with_it.stdout
    assert with_it.stderr == ""
    assert with_it.returncode == 0


def test_the_sitecustomize_that_was_there_is_still_run(elsewhere):
    folder, start = elsewhere
    (folder / "sitecustomize.py").write_text("import sys\nsys.was_here = __file__\n")
    code = "import sys; print(sys.was_here, sys.modules['sitecustomize'].__file__)"
    done = start(*RUN, sys.executable, "-c", code)
    assert done.stdout.split() == [str(folder / "sitecustomize.py")] * 2
    assert done.stderr == ""


def test_a_sitecustomize_that_fails_is_told_by_python_and_hides_nothing(elsewhere):
    folder, start = elsewhere
    (folder / "sitecustomize.py").write_text("import nothing_of_this_name\n")
    (folder / "deepspeed.py").write_text(FAKE_DEEPSPEED)
    done = start(*RUN, sys.executable, "-c", "import deepspeed")
    without = start(sys.executable, "-c", "print()")
    assert "nothing_of_this_name" in without.stderr
    assert without.stderr.splitlines()[0] in done.stderr
    assert "UnsupportedDeepSpeedError" in done.stderr


@pytest.mark.parametrize(
    "what", ["import deepspeed", "import deepspeed.ops", "from deepspeed import ops"]
)
def test_an_unsupported_deepspeed_is_refused_where_it_is_imported(elsewhere, what):
    folder, start = elsewhere
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text(FAKE_DEEPSPEED)
    (folder / "deepspeed" / "ops.py").write_text("")
    for rank in "01":
        done = start(*RUN, sys.executable, "-c", what, RANK=rank)
        assert done.returncode == 1
        assert "UnsupportedDeepSpeedError: DeepSpeed 0.1 " in done.stderr
    assert start(sys.executable, "-c", what).returncode == 0


def test_hiding_the_refusal_once_does_not_lead_to_stock(elsewhere):
    """Programs try to import DeepSpeed and go on without it; the next import is refused again."""
    folder, start = elsewhere
    (folder / "deepspeed.py").write_text(FAKE_DEEPSPEED)
    code = "try:\n    import deepspeed\nexcept RuntimeError:\n    import deepspeed\nprint('stock')"
    done = start(*RUN, sys.executable, "-c", code)
    assert done.returncode == 1
    assert "stock" not in done.stdout


def test_a_missing_deepspeed_is_missed_as_ever(elsewhere):
    _, start = elsewhere
    bare = [*RUN, sysconfig.get_config_var("BINDIR") + "/python3", "-c"]
    assert (
        "ModuleNotFoundError: No module named 'deepspeed'"
        in start(*bare, "import deepspeed").stderr
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["-E"], "-E"),
        (["-I", "train.py"], "-I"),
        (["-uOS", "train.py"], "-S"),
        (["-W", "ignore", "-Xdev", "-I"], "-I"),
        (["-u", "-W", "-E", "train.py", "-E"], ""),
        (["-mI", "-I"], ""),
        (["-c", "-I"], ""),
        (["--version"], ""),
    ],
)
def test_a_python_that_ignores_the_path_is_refused(capsys, monkeypatch, flags, why):
    """It would train with stock in silence."""
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *given: started.append(given))
    status = main(["python3.11", *flags])
    said = capsys.readouterr().err
    if why:
        assert (status, started) == (2, [])
        assert f"python3.11 is started with {why} and does not look at PYTHONPATH" in said
    else:
        assert [given[1] for given in started] == [["python3.11", *flags]]
        assert said == ""


CHILDREN = """
import os, subprocess, sys
child = [sys.executable, "-c", "print(1)"]
bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
subprocess.run(child, check=True)
subprocess.run(["/bin/sh", "-c", ":"], env={}, check=True)
subprocess.run([sys.executable, "-I", "-c", "print(2)"], check=True)
for _ in range(2):
    subprocess.run(child, env=bare, check=True)
os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-E", "-c", "print(3)"], os.environ)
os.execve(os.fsencode(sys.executable), ["python", "-S", "-c", "print(4)"], os.environ)
"""


def test_processes_that_are_started_without_it_are_told_of_once(elsewhere):
    _, start = elsewhere
    done = start(*RUN, sys.executable, "-c", CHILDREN)
    assert done.returncode == 0
    assert sorted(done.stdout.split()) == ["1", "1", "1", "2", "3", "4"]
    told = [line for line in done.stderr.splitlines() if "so that DeepSpeed is stock's" in line]
    hows = ["with -I and", f"without {HOOK} in", "with -E and", "with -S and"]
    assert len(told) == len(hows)
    for line, how in zip(told, hows, strict=True):
        assert f"deep_optimizer_states: {sys.executable} is started {how} " in line


def test_a_python_without_the_plugin_says_so(elsewhere):
    folder, start = elsewhere
    (folder / "deepspeed.py").write_text(FAKE_DEEPSPEED)
    python = sysconfig.get_config_var("BINDIR") + "/python3"
    path = os.pathsep.join([str(HOOK), str(folder)])
    done = start(python, "-c", "import deepspeed", PYTHONPATH=path)
    assert done.returncode == 1
    assert f"RuntimeError: deep_optimizer_states cannot be imported by {python}" in done.stderr
    assert "install the package there, or leave `run` out" in done.stderr


def test_the_process_is_the_commands_so_that_signals_reach_it():
    code = "import os; print(os.getpid(), flush=True)\nwhile True: pass"
    # It is never asleep: a signal that comes just before a sleep is handled after it.
    command = [*RUN, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert int(process.stdout.readline()) == process.pid
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.communicate()[1]
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([], 2, "usage: python -m deep_optimizer_states run COMMAND"),
        (["--"], 2, "usage: python -m deep_optimizer_states run COMMAND"),
        (["no-such-command"], 127, "no-such-command cannot be run: No such file"),
        (["./train.py"], 126, "./train.py cannot be run: Permission denied: give `python ./train"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_line(elsewhere, words, status, told):
    folder, start = elsewhere
    (folder / "train.py").write_text("")
    done = start(*RUN, *words)
    assert done.returncode == status
    assert done.stderr.startswith(told)


def test_the_environment_of_a_run_within_a_run_is_the_same():
    once = environment({"PYTHONPATH": "/a:/b", "HOME": "/c"})
    assert once == {"PYTHONPATH": f"{HOOK}:/a:/b", "HOME": "/c"}
    assert environment(once) == once
    assert environment({}) == {"PYTHONPATH": str(HOOK)}


ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
OURS = "InterleavedZeroOptimizer"
DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "deep_optimizer_states": {"enabled": True, "policy": "dynamic"},
}


def told_by(num_ranks, done, folder):
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert INSTALLED in done.stderr
    (line,) = (line for line in done.stdout.splitlines() if USES in line)  # of rank 0 alone
    assert f"{USES} (DeepSpeed {metadata.version('deepspeed')}, ZeRO stage 3): policy " in line
    assert "step_before_norm off, device_memory_bytes 0" in line
    return [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(num_ranks)]


def knows_the_plugin(program):
    return "import deep_optimizer_states" in program.read_text()


@pytest.mark.slow
def test_ranks_of_torchrun_train_with_it_though_no_line_says_so(elsewhere):
    folder, start = elsewhere
    program = WORKERS / "unaware_program.py"
    assert not knows_the_plugin(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start(*RUN, sys.executable, *launcher, program, folder, **ONE_THREAD)
    assert told_by(2, done, folder) == [OURS, OURS]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("accelerate"), reason="not installed: accelerate")
def test_a_trainer_under_accelerate_launch_and_its_yaml_trains_with_it(elsewhere):
    folder, start = elsewhere
    program = WORKERS / "tiny_llama.py"
    assert not knows_the_plugin(program)
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    (folder / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\n"
        f"deepspeed_config: {{deepspeed_config_file: {folder}/ds.json, zero3_init_flag: true}}\n"
        "num_machines: 1\nnum_processes: 1\n"
    )
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch"]
    launch += ["--config_file", "accelerate.yaml", "--main_process_port", free_port()]
    done = start(*RUN, sys.executable, *launch, program, folder, **ONE_THREAD)
    assert told_by(1, done, folder) == [OURS]
