"""Run DeepSpeed's own unit tests with the plugin beside stock, and write docs/deepspeed-tests.md.

``nox -s "deepspeed-tests(RELEASE)"`` runs it in an environment of that release::

    python tests/deepspeed_suite/suite.py SOURCE --work FOLDER [FILE ...]

SOURCE is a checkout of DeepSpeed, FILE one of its tests below ``tests/unit`` (default: all that are
listed here). Each test is run under stock first, as it is written. One that offloads its optimizer
is then run with the plugin. One that could offload it, since it has a ZeRO stage and Adam, is run
twice more with an offload added, under stock and with the plugin. What is known of other files
stays in FOLDER, so that a run may be made in parts.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "deepspeed-tests.md"
FILES = (HERE / "files.txt").read_text().split()  # those of most worth first
SAME, PASSED, REFUSED = "same bits", "passed", "refused"
OTHER, ALONE, STOCK_ALONE = "other bits", "plugin alone fails", "stock alone fails"
BOTH, SKIPPED, NONE = "both fail", "skipped", "no offload"
COLUMNS = (SAME, PASSED, REFUSED, OTHER, ALONE, STOCK_ALONE, BOTH)
WAYS = {"own": "As written: the test offloads its optimizer", "added": "With an offload added"}


def offload_of(record):
    """Return "own", "could be added" or "none", of what a test's configs have."""
    found = {value for _, kind, value in record["notes"] if kind == "offload"}
    return next((each for each in ("own", "could be added") if each in found), "none")


def values_of(record, kind):
    return [value for _, found, value in record["notes"] if found == kind]


def verdict(stock, ours):
    """Judge a test by its record under stock and, where it was run, with the plugin."""
    if ours is None:
        return SKIPPED if stock["outcome"] == "skipped" else NONE
    passes = (stock["outcome"] == "passed", ours["outcome"] == "passed")
    if all(passes):
        if not any(values_of(ours, "engine")):
            return NONE
        bits = [[line for line in each["notes"] if line[1] == "bits"] for each in (stock, ours)]
        return OTHER if bits[0] != bits[1] else SAME if bits[0] else PASSED
    if passes[0]:
        return REFUSED if values_of(ours, "refused") else ALONE
    if stock["outcome"] == "skipped":
        return SKIPPED
    return STOCK_ALONE if passes[1] else BOTH


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
        notes, results = self.work / "notes.jsonl", self.work / "results.jsonl"
        for path in (notes, results):
            path.write_text("")
        task = {"notes": str(notes), "results": str(results), "plugin": plugin, "add": add}
        env = os.environ | {
            "DEEPSPEED_SUITE": json.dumps({**task, "only": only}),
            "PYTHONPATH": os.pathsep.join((str(HERE), str(self.tests))),
            "DS_ACCELERATOR": "cpu",
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_UNITTEST_TIMEOUT": "3600",  # a test's own limit comes first
            "LOCAL_SIZE": "4",  # accelerators that a CPU is taken for
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        words = ["-p", "suite_hook", "-p", "no:cacheprovider", "--timeout=300", "-q", "--tb=short"]
        command = [sys.executable, "-m", "pytest", *words, f"unit/{file}.py"]
        with (self.work / "output.txt").open("a") as output:
            subprocess.run(command, cwd=self.tests, env=env, stdout=output, stderr=output)
        records = [json.loads(line) for line in results.read_text().splitlines()]
        return {record["test"]: record for record in records}

    def judge(self, file):
        """Return a row for each test of a file: way, verdict, test and the reason."""
        stock = self.run(file)
        offloads = {test: offload_of(record) for test, record in stock.items()}
        own = [test for test, offload in offloads.items() if offload == "own"]
        free = [test for test, offload in offloads.items() if offload == "could be added"]
        ours = self.run(file, plugin=True, only=own)
        stock |= self.run(file, add=True, only=free)
        ours |= self.run(file, plugin=True, add=True, only=free)
        rows = []
        for test, record in stock.items():
            other = ours.get(test)
            found = verdict(record, other)
            refusals = values_of(other, "refused") if other else []
            why = refusals[0] if found == REFUSED else (other or record)["why"] or record["why"]
            way = "added" if test in free else "own" if test in own else "none"
            rows.append([way, found, test, why])
        return rows


def section(release, files, today):
    """Return the page's part of a release, from file -> rows."""
    rows = [(file, *row) for file, found in files.items() for row in found]
    totals = Counter((SKIPPED if v == SKIPPED else NONE) for _, _, v, _, _ in rows if is_out(v))
    text = [f"## DeepSpeed {release}", ""]
    text += [
        f"{today}, torch {metadata.version('torch')}, Python {sys.version_info[0]}."
        f"{sys.version_info[1]}: {len(rows)} tests of {len(files)} files. {totals[SKIPPED]} skip "
        f"themselves on a CPU, and {totals[NONE]} have no optimizer that could be offloaded."
    ]
    for way, title in WAYS.items():
        counts = defaultdict(Counter)
        for file, found_way, found, _, _ in rows:
            if found_way == way and not is_out(found):
                counts[file][found] += 1
        counts["all"] = sum(counts.values(), Counter())
        text += ["", f"**{title}.**", "", f"| file | {' | '.join(COLUMNS)} |"]
        text += ["|---|" + "---:|" * len(COLUMNS)]
        text += [f"| {f} | {' | '.join(str(n[c]) for c in COLUMNS)} |" for f, n in counts.items()]
    for column in (REFUSED, OTHER, ALONE, STOCK_ALONE, BOTH):
        reasons = defaultdict(list)
        for file, _, found, test, why in rows:
            if found == column:
                reasons[why].append(f"{Path(file).name} {test.rpartition('::')[2]}")
        if reasons:
            text += ["", f"{column.capitalize()}:", ""]
            text += [f"- {', '.join(tests)}: `{one_line(w)}`" for w, tests in reasons.items()]
    return "\n".join(text) + "\n"


def is_out(found):
    return found in (SKIPPED, NONE)


def one_line(why):
    line = " ".join(why.split()).replace("`", "'")
    return line if len(line) < 300 else line[:300] + "..."


def write_page(release, text):
    """Put a release's part in the place of its last one."""
    head, *parts = PAGE.read_text().split("\n## ")
    found = {part.partition("\n")[0]: "## " + part.rstrip() + "\n" for part in parts}
    found[f"DeepSpeed {release}"] = text
    PAGE.write_text("\n".join([head.rstrip() + "\n", *found.values()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="checkout of DeepSpeed")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("files", nargs="*", metavar="FILE", default=FILES)
    given = parser.parse_args()
    release = metadata.version("deepspeed")
    given.work.mkdir(parents=True, exist_ok=True)
    known = given.work / "known.json"
    files = json.loads(known.read_text()) if known.exists() else {}
    suite = Suite(given.source, given.work.resolve())
    for file in given.files:
        if not (suite.tests / "unit" / f"{file}.py").exists():
            continue
        files[file] = suite.judge(file)
        print(file, dict(Counter(found for _, found, _, _ in files[file])), flush=True)
        known.write_text(json.dumps(files, indent=1))
        write_page(release, section(release, files, datetime.date.today().isoformat()))
    found = [row for rows in files.values() for row in rows if row[1] in (OTHER, ALONE)]
    for _, what, test, why in found:
        print(f"{what}: {test}: {why}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
