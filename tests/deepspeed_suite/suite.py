"""Run DeepSpeed's own unit tests with the plugin beside stock, and write a report.

``nox -s "deepspeed-tests(RELEASE)"`` runs it. Each test is run under stock; one that could offload
its optimizer (it has a ZeRO stage and Adam) once more, with an offload added. What passes is run
with the plugin. Results stay in the work folder, so that a run may be made in parts; its
``report.md`` counts by file and names the reasons. docs/results.md keeps the row that is printed.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"
FILES = (HERE / "files.txt").read_text().split()  # those of most worth first
SAME, PASSED, REFUSED = "same bits", "passed", "refused"
OTHER, ALONE = "other bits", "plugin alone fails"
STOCK, VARIES = "stock fails", "stock varies"
SKIPPED, NONE = "skipped", "no offload"
LEFT = "left out"
COLUMNS = (SAME, PASSED, REFUSED, OTHER, ALONE, STOCK, VARIES, LEFT)
TRIES = 5
STOPPED = (pytest.ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
LEFT_OUT = {
    "test_elastic_checkpoint_change_dp[True-False-False]": (
        "expects a refusal of another number of ranks' checkpoint, which the plugin loads"
    )
}
LOST = {"outcome": "failed", "why": "pytest ended before it"}
LOST |= {"engine": [], "bits": [], "refused": []}
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
# A CPU is taken for four accelerators, and a test's own limit comes before DeepSpeed's.
ENVIRONMENT |= {"LOCAL_SIZE": "4", "DS_UNITTEST_TIMEOUT": "3600", "DS_DISABLE_REUSE_DIST_ENV": "1"}
WAYS = {"own": "As written: the test offloads its optimizer", "added": "With an offload added"}


def verdict(stock, ours):
    """Judge a test by its record under stock and, where it was run, with the plugin."""
    if stock["outcome"] == "skipped":
        return SKIPPED
    if stock["outcome"] == "failed" and {"own", "could be added"}.intersection(stock["offload"]):
        return STOCK
    if ours is None or (ours["outcome"] == "passed" and not any(ours["engine"])):
        return NONE
    if ours["outcome"] != "passed":
        return REFUSED if ours["refused"] else ALONE
    if stock["bits"] != ours["bits"]:
        return OTHER
    return SAME if stock["bits"] else PASSED


def name_of(test):
    return test.rpartition("::")[2]


def _function(test):
    """Return class and function of a test, without its parameters."""
    return test.partition("::")[2].partition("[")[0].replace("::", ".")


class Suite:
    """DeepSpeed's tests, copied out of their checkout, next to which they would import it."""

    def __init__(self, source, work):
        self.work = work
        self.tests = work / "tests"
        shutil.rmtree(self.tests, ignore_errors=True)
        shutil.copytree(source / "tests", self.tests)

    def run(self, file, plugin=False, add=False, only=None):
        """Run a file's tests; return test -> record."""
        if only == []:
            return {}
        files = {name: str(self.work / f"{name}.jsonl") for name in ("notes", "results")}
        for path in files.values():
            Path(path).write_text("")
        env = os.environ | ENVIRONMENT
        env["DEEPSPEED_SUITE"] = json.dumps({**files, "plugin": plugin, "add": add})
        env["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, self.tests, SUPPORT)))
        words = ["-p", "suite_hook", "-p", "no:cacheprovider", "--timeout=300", "-q", "--tb=short"]
        command = [sys.executable, "-m", "pytest", *words, *(only or [f"unit/{file}.py"])]
        with (self.work / "output.txt").open("a") as output:
            ended = subprocess.run(command, cwd=self.tests, env=env, stdout=output, stderr=output)
        if ended.returncode in STOPPED:
            sys.exit(f"pytest was stopped in {file}: of this file nothing is recorded")
        records = map(json.loads, Path(files["results"]).read_text().splitlines())
        return {record["test"]: record for record in records}

    def judge(self, file):
        """Return a row for each test of a file: way, verdict, test and the reason."""
        stock = self.run(file)
        own = {test for test, record in stock.items() if "own" in record["offload"]}
        could = {test for test, record in stock.items() if "could be added" in record["offload"]}
        stock |= self.run(file, add=True, only=sorted(could - own))
        passed = {test for test, record in stock.items() if record["outcome"] == "passed"}
        left = {test: LEFT_OUT[name] for test in passed if (name := name_of(test)) in LEFT_OUT}
        passed -= left.keys()
        ours = dict.fromkeys(passed & (own | could), LOST)
        ours |= self.run(file, plugin=True, only=sorted(passed & own))
        ours |= self.run(file, plugin=True, add=True, only=sorted((passed & could) - own))
        rows = []
        for test, record in stock.items():
            other = ours.get(test)
            found = LEFT if test in left else verdict(record, other)
            if found in (OTHER, ALONE) and self.stock_does_so(found, file, test, record, own):
                found = VARIES
            why = other["refused"][0] if found == REFUSED else (other or record)["why"]
            why = left.get(test) or why
            way = "own" if test in own else "added"
            rows.append([way, found, test, why or record["why"]])
        return rows

    def stock_does_so(self, found, file, test, record, own):
        """Run stock again; return whether it too fails the test, or else trains other bits."""
        for _ in range(TRIES):
            again = self.run(file, add=test not in own, only=[test]).get(test, LOST)
            if again["outcome"] == "failed" or (found == OTHER and again["bits"] != record["bits"]):
                return True
        return False


def section(release, files, today):
    """Return the report of a release, from file -> rows."""
    rows = [(file, *row) for file, found in files.items() for row in found]
    totals = Counter(found for _, _, found, _, _ in rows)
    text = [
        f"# DeepSpeed {release}\n",
        f"{today}, torch {metadata.version('torch')}, Python {platform.python_version()}: "
        f"{len(rows)} tests of {len(files)} files. {totals[SKIPPED]} skip themselves on a CPU, and "
        f"{totals[NONE]} have no optimizer that could be offloaded.",
    ]
    for way, title in WAYS.items():
        counts = defaultdict(Counter)
        for file, found_way, found, _, _ in rows:
            if found_way == way and found in COLUMNS:
                counts[file][found] += 1
                counts["all"][found] += 1
        text += [f"\n**{title}.**\n", f"| file | {' | '.join(COLUMNS)} |"]
        text += ["|---|" + "---:|" * len(COLUMNS)]
        for file in [*filter(counts.get, files), "all"]:
            text += [f"| {file} | {' | '.join(str(counts[file][each]) for each in COLUMNS)} |"]
    for column in (*COLUMNS[2:], SKIPPED):
        reasons = defaultdict(Counter)
        for file, _, found, test, why in rows:
            if found == column:
                reason = _reason(why) or ("other bits" if found in (OTHER, VARIES) else "no reason")
                reasons[reason][f"{Path(file).name} {_function(test)}"] += 1
        text += [f"\n{column.capitalize()}:\n"] if reasons else []
        for reason, tests in reasons.items():
            named = [f"{name} ({n})" if n > 1 else name for name, n in tests.items()]
            text.append(f"- {', '.join(named)}: {reason}")
    return "\n".join(text) + "\n"


def _reason(why):
    """Return a test's reason without folders, in which runs differ, and without long numbers."""
    line = re.sub(r"(?<![:/\w])/\S+/", "", " ".join(why.split()).replace("`", "'"))
    line = re.sub(r"\b\d{6,}\b", "N", line)
    return line and f"`{line[:300]}`"


def summary(release, files):
    """Return the row of docs/results.md: verdicts of both ways together."""
    totals = Counter(found for rows in files.values() for _, found, *_ in rows)
    return f"| {release} | {' | '.join(str(totals[each]) for each in COLUMNS)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="checkout of DeepSpeed")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("files", nargs="*", metavar="FILE", default=FILES)
    given = parser.parse_intermixed_args()
    release = metadata.version("deepspeed")
    known = given.work / "known.json"
    files = json.loads(known.read_text()) if known.exists() else {}
    from deepspeed.accelerator import get_accelerator

    for op in ("ShareMemComm", "CPUAdam", "FusedAdam", "Utils", "PinMemory"):
        # A test that compiled one would run out of time; a release may lack one.
        with contextlib.suppress(Exception):
            get_accelerator().create_op_builder(f"{op}Builder").load()
    suite = Suite(given.source, given.work.resolve())
    for file in given.files:
        if (suite.tests / "unit" / f"{file}.py").exists():
            files[file] = suite.judge(file)
        print(file, Counter(found for _, found, *_ in files.get(file, [])), flush=True)
        known.write_text(json.dumps(files, indent=1))
        report = section(release, files, datetime.date.today().isoformat())
        (given.work / "report.md").write_text(report)
    print(f"{given.work / 'report.md'}\n{summary(release, files)}")
    found = [row for rows in files.values() for row in rows if row[1] in (OTHER, ALONE)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
