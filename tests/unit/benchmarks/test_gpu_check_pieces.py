"""What single pieces of `make gpu-check` make of what they find."""

import ctypes
import json
import subprocess
import sys

import pytest
from made_sweeps import write_sweep

from benchmarks.gpu_check import equality, facts, install, mappings, memory, rows, sanitizer
from benchmarks.gpu_check.pieces import LEFT_OUT_STATUS


def test_only_packages_that_lack_are_installed(tmp_path):
    for name in ("pytest-1.0-py3-none-any.whl", "typing_extensions-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    lacking = tmp_path / "not_here_yet-1.0-py3-none-any.whl"
    lacking.touch()
    assert install.wheels_that_lack(tmp_path) == [lacking]


def test_a_package_that_lacks_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(install, "NEEDED", ("pytest", "not-here"))
    with pytest.raises(SystemExit, match=r"not installed: not-here\. Run `make setup`.*--wheels"):
        install.report()


def test_facts_name_the_machine_and_what_results_depend_on(tmp_path, capsys):
    assert facts.main([str(tmp_path / "facts.json")]) == 0
    found = json.loads((tmp_path / "facts.json").read_text())
    assert sys.version.split()[0] in found["key"]
    assert found["memory"]["MemTotal"] > 0
    assert found["packages"]["pytest"] != "not installed"
    assert "* machine: " in capsys.readouterr().out


def test_a_tool_that_is_not_there_is_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    assert sanitizer.main(["10"]) == LEFT_OUT_STATUS
    assert "not installed here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("codes", "status", "said"),
    [
        ([0, 0], 0, ["memcheck: found nothing", "initcheck: found nothing"]),
        ([9, 0], 1, ["memcheck: FOUND ERRORS", "initcheck: found nothing"]),
        ([0, 2], 1, ["memcheck: found nothing", "initcheck: ended with status 2"]),
        ([0, None], 1, ["memcheck: found nothing", "initcheck: not done after 5 s"]),
    ],
)
def test_the_sanitizers_verdicts(monkeypatch, capsys, codes, status, said):
    left = list(codes)

    def run(command, check, timeout):
        code = left.pop(0)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: "/bin/compute-sanitizer")
    monkeypatch.setattr(sanitizer.subprocess, "run", run)
    assert sanitizer.main(["10"]) == status
    assert capsys.readouterr().out.splitlines() == [f"* {line}" for line in said]


class Locks:
    """Notes what is locked, and refuses when it is told to."""

    def __init__(self, status=0):
        self.status, self.locked = status, []

    def lock(self, address, num_bytes):
        assert ctypes.string_at(address, 1) == b"\0"  # mapped, or this process ends here
        self.locked.append((address, num_bytes))
        return self.status

    def unlock(self, address, num_bytes):
        self.locked.remove((address, num_bytes))


@pytest.mark.parametrize("mapping", mappings.MAPPINGS, ids=lambda mapping: mapping.name)
def test_each_mapping_is_locked_and_unlocked_from_a_huge_pages_begin(mapping):
    locks = Locks()
    told = mappings.measure(mapping, 2**22, locks, cuda=False)
    assert told.startswith(f"{mapping.name}: registered at ")
    assert locks.locked == []
    refused = Locks(status=2)
    assert "refused with status 2" in mappings.measure(mapping, 2**22, refused, cuda=False)
    assert refused.locked[0][0] % 2**21 == 0


def test_memory_is_touched_up_to_what_is_asked_for(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr(memory, "_take", lambda idx: taken.append(idx))
    monkeypatch.setattr(memory, "gib_of", lambda name: 100.0)
    assert memory.main(["6"]) == 0
    assert len(taken) == 6
    taken.clear()
    monkeypatch.setattr(memory, "gib_of", lambda name: 5.0)
    assert memory.main(["6"]) == 0
    assert taken == []
    assert "touched 0 GiB" in capsys.readouterr().out


UPDATES = [
    {"update": 1, "begin_s": 0.0, "end_s": 9.0, "busy_s": {}, "bound_by": ""},
    {"update": 2, "begin_s": 1.0, "end_s": 1.5, "busy_s": {"CPU": 0.4}, "bound_by": "CPU"},
]
LOSSES = (9.0, 8.5, 8.25, 8.125)
OTHERS = (9.0, 8.5, 8.25, 7.0)


def made(folder, *runs):
    """A sweep's folder with runs of three seconds: engine, status and losses of each."""
    write_sweep(folder, [(e, {}, status, losses, (3.0,) * 4) for e, status, losses in runs])
    return folder


def test_rows_are_told_with_the_last_update_of_their_timelines(tmp_path, capsys):
    folder = made(tmp_path / "gpu", ("vanilla", "ok", LOSSES), ("dynamic", "ok", LOSSES))
    timeline = folder / "log-dynamic" / "run-001" / "timeline"
    timeline.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in UPDATES)
    (timeline / "rank-0.jsonl").write_text(lines)
    assert rows.report(folder) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "* 1.3B vanilla: ok, iteration 3.000 s, update 0.400 s",
        "* 1.3B dynamic: ok, iteration 3.000 s, update 0.400 s",
        "*   last update 0.500 s, busy: CPU 0.400",
    ]
    assert told[3].startswith("* 1.3B dynamic: equal to vanilla")
    assert rows.last_update(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("runs", "bad"),
    [
        ([("vanilla", "ok", LOSSES), ("dynamic", "ok", LOSSES)], ""),
        ([("vanilla", "ok", LOSSES), ("dynamic", "ok", OTHERS)], "1.3B dynamic"),
        ([("vanilla", "oom-host", ()), ("dynamic", "ok", LOSSES)], ""),
        ([("vanilla", "ok", LOSSES), ("dynamic", "failed", LOSSES[:2])], "1.3B dynamic"),
        ([("vanilla", "ok", LOSSES), ("zenflow", "ok", OTHERS)], ""),
        ([("vanilla", "ok", LOSSES), ("superoffload", "failed", ())], ""),
    ],
    ids=["equal", "differs", "stock does not fit", "ours fails", "stale", "another's fails"],
)
def test_rows_of_ours_have_to_train_what_stock_does(tmp_path, capsys, runs, bad):
    assert rows.report(made(tmp_path / "gpu", *runs)) == int(bool(bad))
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last == f"* FAILED OR DIFFERENT: {bad}") == bool(bad)


@pytest.mark.parametrize("with_timeline", [True, False])
@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 0), (2, 2), (130, 130)])
def test_a_piece_runs_its_sweep_in_time(tmp_path, monkeypatch, with_timeline, code, expected):
    folder, given, bounded = tmp_path / "peers" / "gpu", [], []
    monkeypatch.setattr(rows.sweep, "main", lambda words: given.extend(words) or code)
    monkeypatch.setattr(rows.bound, "main", lambda words: bounded.append(words[0]))
    made(folder, ("vanilla", "ok", LOSSES))
    if with_timeline:
        (folder / "log-vanilla" / "run-001" / "timeline").mkdir()
    assert rows.main([str(tmp_path), "peers", "gpu", "90"]) == expected
    assert given[given.index("--minutes") + 1] == "1.5"
    assert bounded == ([] if with_timeline or code > 1 else [str(folder)])


class Worker:
    """Stands for the tests' worker: a result is the policy's name, and one of them is wrong."""

    def run(self, case, block):
        if block == "raises":
            raise RuntimeError("no room")
        return block, "state", "class"

    def differences(self, ours, stock):
        return ["losses"] if ours[0] == "wrong" else []


def test_a_policy_that_differs_or_fails_stops_no_other(tmp_path, capsys):
    out = tmp_path / "found.json"
    comparison = equality.Comparison(Worker(), out)
    comparison.compare("case", None, {"a": "wrong", "b": "raises", "c": "right"})
    found = {"case | a": ["losses"], "case | b": ["RuntimeError: no room"], "case | c": []}
    assert comparison.found == found
    assert json.loads(out.read_text()) == found
    assert "DIFFERS ['losses']" in capsys.readouterr().out


def test_the_few_policies_begin_with_just_in_time_and_cover_every_policy():
    host = {"enabled": True, "policy": "all-host"}
    ratio = {"enabled": True, "policy": "ratio", "ratio": 0.5}
    blocks = equality.few_policies({"all-host": host, "ratio 0.5": ratio})
    assert len(blocks) == 6
    first = next(iter(blocks.values()))
    assert first.get("just_in_time_forward", True)
    policies = {block["policy"] for block in blocks.values()}
    assert policies == {"stride", "dynamic", "all-host", "all-device", "ratio"}
