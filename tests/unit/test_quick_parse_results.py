import gzip
import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "quick-parse-results.py"
ARTIFACT = ROOT / ".." / "shared" / "data" / "logs" / "artifact"
LOSSES = (9.0, 8.5, 8.25, 8.125, 8.0)


def log_text(losses=LOSSES, seconds=0.5, update=100.0):
    lines = []
    for i, loss in enumerate(losses):
        time, samples = seconds + 0.01 * i, i + 1
        shown = "" if loss is None else f" lm loss: {loss:.6E} |"
        lines += [
            f"[Rank 0] time (ms) | fwd: 10.00 | bwd: 40.00 | bwd_inner: 30.00 | "
            f"bwd_allreduce: 10.00 | step: {update:.2f}",
            f"<TIMER:interval-time,{time!r}>",
            f" elapsed_time {time:.6f} | consumed samples: {samples} | consumed tokens: "
            f"{samples * 8} | elapsed time per iteration (ms): {time * 1e3:.1f} | learning rate: "
            f"1.0E-04 | global batch size: 1 |{shown} loss scale: 1.0 | actual seqlen: 8 | "
            "number of skipped iterations: 0 | TFLOPs: 1.00 |",
        ]
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture
def run(tmp_path):
    """Run the script as a user would: another folder, and no site-packages at all."""

    def execute(vanilla, ours, *options):
        paths = []
        for name, content in (("a b.log", vanilla), ("c.log", ours)):
            path = tmp_path / name
            if isinstance(content, Path):
                path = content
            elif content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            paths.append(str(path))
        command = [sys.executable, "-S", "-E", "-W", "error", str(SCRIPT)]
        command += ["--vanilla-deepspeed", paths[0], "--deep-optimizer-states", paths[1], *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return execute


def test_equal_runs_print_times_then_verdicts_then_the_speed_up(run):
    done = run(log_text(seconds=0.5), log_text(seconds=0.25, update=50))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["Interval times from Vanilla Deepspeed:", "Iteration 1: 0.50 seconds"]
    assert lines[6] == "Interval times from Deep Optimizer States:"
    assert "Loss, vanilla: trains" in lines
    assert "Pair: equal (5 losses as printed)" in lines
    assert "Judged on 5 losses as printed" in lines
    assert "note" not in done.stdout
    assert lines[-1] == "speed-up: 1.909x (tolerance 0.001)"


def test_json_is_one_object_with_the_promised_keys(run):
    done = run(log_text(seconds=0.5), log_text(seconds=0.25, update=50), "--json")
    result = json.loads(done.stdout)
    assert result["iterations"]["vanilla"] == pytest.approx([0.5, 0.51, 0.52, 0.53, 0.54])
    assert len(result["iterations"]["deep_optimizer_states"]) == 5
    assert result["verdict"] == {
        "vanilla": "trains", "deep_optimizer_states": "trains", "pair": "equal",
    }  # fmt: skip
    assert result["ratio"]["iteration"] == pytest.approx(0.525 / 0.275)
    assert result["ratio"]["forward"] == result["ratio"]["backward"] == 1.0
    assert result["ratio"]["update"] == 2.0
    assert result["speedup"] == result["ratio"]["iteration"]
    assert result["speedup_withheld"] is None


@pytest.mark.parametrize(
    ("losses", "word", "pair", "why"),
    [
        ((9.0, math.log(50304)) + (math.log(50304),) * 3, "frozen", "differs", "ln(50304)"),
        ((9.0, 8.5, None, None, None), "nan", "differs", "nan from iteration 3"),
        ((9.0, 8.5, 8.25, 8.125, math.nan), "nan", "differs", "nan from iteration 5"),
        ((9.0, 8.5, 8.3, 8.1, 8.0), "trains", "differs", "differs from iteration 3"),
        ((9.0, 8.5), "trains", "equal", "1 timed iterations after a warm-up of 1"),
    ],
)
def test_a_speed_up_is_withheld_with_its_reason(run, losses, word, pair, why):
    result = json.loads(run(log_text(), log_text(losses), "--json").stdout)
    assert result["verdict"]["deep_optimizer_states"] == word
    assert result["verdict"]["pair"] == pair
    assert result["speedup"] is None
    assert why in result["speedup_withheld"]
    assert (
        run(log_text(), log_text(losses)).stdout.splitlines()[-1].startswith("speed-up withheld: ")
    )


def test_tolerance_and_warmup_are_options(run):
    near = (9.0, 8.5, 8.25, 8.125, 8.0005)
    assert (
        json.loads(run(log_text(), log_text(near), "--json").stdout)["verdict"]["pair"] == "close"
    )
    strict = run(log_text(), log_text(near), "--json", "--tolerance", "1e-4", "--warmup", "3")
    result = json.loads(strict.stdout)
    assert (result["verdict"]["pair"], result["warmup"]) == ("differs", 3)
    assert result["mean_ms"]["vanilla"]["iteration"] == pytest.approx(535)


def test_another_size_of_subgroups_is_named_beside_losses_that_are_not_equal(run):
    def sized(numel, losses=LOSSES):
        config = f"stage=3 sub_group_size={numel} ratio=1.0"
        return f"[date] [INFO] [config.py:1:print]   zero_config .... {config}\n{log_text(losses)}"

    near = (9.0, 8.5, 8.25, 8.125, 8.0005)
    note = "note: sub_group_size differs (1000 and 500), which may change"
    assert note in run(sized(1000), sized(500, near)).stdout
    assert "sub_group_size" not in run(sized(1000), sized(1000, near)).stdout
    assert "sub_group_size" not in run(sized(1000), log_text(near)).stdout
    assert "sub_group_size" not in run(sized(1000), sized(500)).stdout


def test_a_cpu_run_says_that_its_times_are_no_gpus(run):
    text = "Setting ds_accelerator to cpu (auto detect)\n" + log_text()
    done = run(text, log_text()).stdout
    assert "note: the model ran on a CPU" in done
    assert done.splitlines()[-1] == "speed-up withheld: measured on a CPU"


def test_a_log_cut_after_some_iterations_is_used_with_a_note(run):
    text = log_text()
    done = run(text, text[: text.rindex("lm loss")])
    assert done.returncode == 0
    assert "note: 5 and 4 iterations; the 4 that both have were compared" in done.stdout
    assert "note: ours: the log ends in the middle of a line; its 4 complete" in done.stdout


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no such file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not a training log"),
        ("using world size: 1, data-parallel-size: 1\n", "no complete iteration"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_log_that_cannot_be_used_is_one_line_and_exit_code_2(run, content, why, side):
    logs = [log_text(), log_text()]
    logs[side] = content
    done = run(*logs, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert why in done.stderr
    assert ("a b.log", "c.log")[side] in done.stderr


def test_logs_without_a_common_iteration_cannot_be_compared(run):
    later = log_text().splitlines(keepends=True)[-3:]
    done = run(log_text((9.0, 8.5)), "".join(later))
    assert done.returncode == 2
    assert "no iteration in common" in done.stderr


@pytest.mark.parametrize("options", [("--warmup", "-1"), ("--tolerance", "nan"), ("--nonsense",)])
def test_a_wrong_option_is_exit_code_2_without_a_traceback(run, options):
    done = run(log_text(), log_text(), *options)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not [*ARTIFACT.glob("*.log")], reason="the authors' logs are not here")
def test_the_authors_sample_pair(run):
    vanilla, ours = sorted(ARTIFACT.glob("*.log"))
    result = json.loads(run(vanilla, ours, "--json").stdout)
    ratios = [f"{result['ratio'][name]:.3f}" for name in ("iteration", "backward", "update")]
    assert ratios == ["1.392", "3.054", "0.945"]
    assert result["verdict_detail"]["deep_optimizer_states"]["frozen_at_name"] == "ln(50304)"
    assert result["speedup"] is None
    assert "frozen at ln(50304)" in run(vanilla, ours).stdout


NAME = "log-7B-tp1-dp1-l2-h4-a2-sl8-gbs1-mbs1-ratio1-subg100-prefetch{}-flush_async{}-opt_gaps2.log"


@pytest.fixture
def named(tmp_path):
    """Logs with the names of two engines."""
    paths = tmp_path / NAME.format(0, 0), tmp_path / NAME.format(1, 1)
    for path in paths:
        path.write_text(log_text())
    return paths


def test_swapped_logs_are_refused_by_their_own_names(run, named):
    vanilla, hybrid = named
    done = run(hybrid, vanilla)
    assert (done.returncode, done.stdout) == (2, "")
    assert "its name says stride" in done.stderr
    assert "they are swapped; exchange the two" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run(vanilla, hybrid).returncode == 0
    assert run(log_text(), vanilla).returncode == 0, "a name that says nothing proves nothing"


def test_a_log_given_twice_is_refused(run, named, tmp_path):
    link = tmp_path / "another name.log"
    link.symlink_to(named[0])
    for second in (named[0], link):
        done = run(named[0], second)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is given twice" in done.stderr


@pytest.mark.parametrize("change", [
    gzip.compress, lzma.compress, lambda data: data.replace(b"\n", b"\r\n") + b"\n",
])  # fmt: skip
def test_two_copies_of_a_log_are_one_log_and_no_speed_up(run, change):
    done = run(log_text(), change(log_text().encode()))
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("speed-up withheld: ")
    assert "c.log says the same as " in last
    assert last.endswith("line by line: one log given twice")


def test_packed_logs_of_two_runs_have_a_speed_up(run):
    packed = (
        gzip.compress(log_text(seconds=0.5).encode()),
        lzma.compress(log_text(seconds=0.25).encode()),
    )
    assert run(*packed).stdout.splitlines()[-1] == "speed-up: 1.909x (tolerance 0.001)"


def test_the_speed_up_is_the_ratio_of_medians(run):
    slow = log_text(seconds=0.5)
    # One stall in a run moves its mean, and must not make the other one faster.
    stalled = slow.replace("0.53", "9.53").replace("530.0", "9530.0")
    done = run(stalled, log_text(seconds=0.25), "--json", "--tolerance", "1")
    result = json.loads(done.stdout)
    assert (
        result["speedup"] == result["ratio_of_medians"]["iteration"] == pytest.approx(0.53 / 0.275)
    )
    assert result["ratio"]["iteration"] > 10
    text = run(stalled, log_text(seconds=0.25)).stdout
    assert "Median (mean) in ms without the first 1" in text
    assert "530.0 (2775.0) n=4" in text
    assert text.splitlines()[-1] == "speed-up: 1.927x (tolerance 0.001)"
