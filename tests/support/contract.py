"""Writes what the project promises from outside into a folder, and compares two such folders.

``python tests/support/contract.py freeze FOLDER [--only PART...]`` runs the checkout's commands;
``python tests/support/contract.py compare BEFORE AFTER`` says what differs and ends with exit code
1 if anything does. The parts, each a folder: ``help`` (every command's ``--help``), ``answers`` (an
output of each command), ``simulated`` (tables of every predicted sweep), ``published`` (tables and
verdicts of the published logs), ``datasets`` (hashes of token files), ``trainers`` (losses and
digests of a short run of each trainer) and ``sweeps`` (tables of every sweep's small form, which
takes an hour). Real text and real logs are read from ``../shared/data`` where it is there.

Run it on one machine for both folders: digests of trained weights depend on the processor.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from same_cells import differences

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
STUDIES = sorted(path.parent.name for path in (ROOT / "configs/studies").glob("*/study.toml"))
PREDICTED_STUDIES = ("interleaved", "peers")
LIMIT_S = 3600.0

HELP = {
    "master-script": ["bash", "master-script.sh"],
    "config-n-run": ["bash", "config-n-run.sh"],
    "quick-parse-results": ["python", "quick-parse-results.py"],
    **{
        name.replace(" ", "-"): ["python", "-m", *name.split()]
        for name in (
            "launch.run",
            "launch.sweep",
            "launch.export",
            "parse",
            "parse diagnose",
            "parse.report",
            "plots",
            "ds_config explain",
            "ds_config advise",
            "dataset",
            "dataset prepare",
            "dataset inspect",
            "dataset merge",
            "deep_optimizer_states",
            "deep_optimizer_states plan",
            "deep_optimizer_states calibrate",
            "deep_optimizer_states run",
            "optimus_cc",
            "optimus_cc predict",
        )
    },
}

PLAN = ["python", "-m", "deep_optimizer_states", "plan"]
ADVISE = ["python", "-m", "ds_config", "advise"]
PREDICT = ["python", "-m", "optimus_cc", "predict"]
ANSWERS = {
    "list": ["bash", "master-script.sh", "--list"],
    "no-such-sweep": ["bash", "master-script.sh", "--sweep", "no-such-sweep", "--dry-run"],
    **{
        f"plan-{model}-{machine}": [*PLAN, "--model", model, "--machine", machine]
        for model, machine in (
            ("7B", "h100x4"),
            ("20B", "h100x4"),
            ("7B", "a100x4"),
            ("7B", "h200x1"),
            ("13B", "h200x8"),
        )
    },
    **{
        f"advise-{model}-{gpus}-{machine}": [
            *ADVISE, "--model", model, "--gpus", gpus, "--machine", machine,
        ]
        for model, gpus, machine in (
            ("7B", "1", "h200x1"),
            ("7B", "4", "h100x4"),
            ("20B", "4", "h100x4"),
            ("13B", "2", "a100x4"),
        )
    },
    "predict-8.3B": [*PREDICT, "--model", "8.3B", "--links", "0.1,1,10,200"],
}  # fmt: skip

TRAINED = {
    "vanilla": ["tiny"],
    "hybrid": ["tiny-hybrid", "--stride", "3"],
    "async-gradients": ["tiny-async-gradients"],
    "gpt2": ["tiny", "--model.architecture", "gpt2"],
    "bf16": ["tiny", "--dtype", "bf16"],
    "two-ranks": ["tiny-hybrid", "--dp", "2", "--global-batch-size", "4"],
    "tensor-parallel": ["tiny", "--tp", "2"],
    "zero-ladder": ["tiny", "--study", "zero-ladder"],
    "optimus-cc": ["tiny", "--study", "optimus-cc"],
    "imdb": ["tiny", "--study", "imdb"],
}
"""Words after ``python -m launch.run``."""

NOT_COMPARED = re.compile(
    r"(_ms|_s|_seconds|_bytes_s|_gib|_bytes|_rate|_throughput|tflops|_pct|_percent)$"
    r"|^(run_id|path|started|date|commit|machine|samples_per_s|speed_?up.*|.*ratio.*)$"
)
"""Columns of trained sweeps that are times, memory or names of one run."""


def freeze(folder, parts):
    folder = folder.resolve()
    for part in parts:
        here = folder / part
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        PARTS[part](here)


def _help(here):
    for name, words in HELP.items():
        _say(here / f"{name}.txt", [*words, "--help"])


def _answers(here):
    for name, words in ANSWERS.items():
        _say(here / f"{name}.txt", words)
    for path in sorted((SHARED / "ds-configs").glob("*.json")):
        _say(here / f"explain-{path.stem}.txt", ["python", "-m", "ds_config", "explain", str(path)])
    for path in sorted((ROOT / "tests/golden/diagnose").glob("*/*.log")):
        _say(here / f"diagnose-{path.stem}.txt", ["python", "-m", "parse", "diagnose", str(path)])


def _simulated(here):
    for study in PREDICTED_STUDIES:
        for machine in ("h100x4", "h200x1"):
            for sweep in _sweeps(study):
                words = ["--study", study, "--sweep", sweep, "--simulate", "--machine", machine]
                _sweep(here, f"{study}-{sweep}-{machine}", words)


def _published(here):
    logs = SHARED / "logs"
    if not logs.is_dir():
        return
    _say(here / "parse.txt", ["python", "-m", "parse", str(logs), "--out", str(here / "tables")])
    pair = sorted((logs / "artifact").glob("*.log"))
    words = ["--vanilla-deepspeed", str(pair[0]), "--deep-optimizer-states", str(pair[1])]
    _say(here / "quick-parse.txt", ["python", "quick-parse-results.py", *words])


def _datasets(here):
    with tempfile.TemporaryDirectory() as made:
        for name, words in _corpora().items():
            place = "--output-prefix" if "--input" in words else "--cache-dir"
            command = ["python", "-m", "dataset", "prepare", *words, place, f"{made}/{name}/{name}"]
            _say(here / f"{name}.txt", command, only_code=True)
        for path in sorted(Path(made).rglob("*")):
            if path.suffix in (".bin", ".idx"):
                found = hashlib.sha256(path.read_bytes()).hexdigest()
                (here / f"{path.name}.sha256").write_text(f"{found}\n")


def _corpora():
    """Words of ``dataset prepare`` for the embedded text and, where it is there, real text."""
    text, gpt2 = SHARED / "text" / "wikitext-2-valid-test.jsonl.xz", SHARED / "gpt2"
    learned = [
        "--input",
        str(ROOT / "LICENSE"),
        "--input-format",
        "text",
        "--sample-by",
        "paragraph",
    ]
    learned += ["--tokenizer", "train-bpe", "--vocab-size", "400"]
    found = {"embedded": [], "learned": learned}
    if text.is_file():
        vocabulary = [
            "--vocab-file",
            str(gpt2 / "vocab.json"),
            "--merge-file",
            str(gpt2 / "merges.txt"),
        ]
        found["wikitext-gpt2"] = ["--input", str(text), "--tokenizer", "gpt2-bpe", *vocabulary]
    return found


def _trainers(here):
    for name, words in TRAINED.items():
        with tempfile.TemporaryDirectory() as made:
            command = ["python", "-m", "launch.run", *words, "--iterations", "4",
                       "--results-dir", made]  # fmt: skip
            code, text = _run(command)
            found = [_of_run(path) for path in sorted(Path(made).rglob("run.json"))]
        (here / f"{name}.txt").write_text(f"exit code {code}\n{json.dumps(found, indent=1)}\n")
        if code:
            (here / f"{name}.log").write_text(text)


def _of_run(path):
    metrics = (path.parent / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    kept = ("iteration", "loss", "grad_norm", "lr", "weights_digest", "optimizer_digest",
            "weights_sha256", "optimizer_sha256", "test_error", "validation_loss")  # fmt: skip
    return [{key: line[key] for key in kept if key in line} for line in lines]


def _trained_sweeps(here):
    for study in STUDIES:
        for sweep in _sweeps(study):
            words = ["--study", study, "--sweep", sweep, "--size", "tiny", "--iterations", "3"]
            _sweep(here, f"{study}-{sweep}", words)


def _sweeps(study):
    """Names of a study's own sweeps, and of those that it takes over."""
    folder = ROOT / "configs/studies" / study
    base = tomllib.loads((folder / "study.toml").read_text()).get("extends")
    own = {path.stem for path in (folder / "sweeps").glob("*.toml")}
    return sorted(own | set(_sweeps(base) if base else ()))


def _sweep(here, name, words):
    with tempfile.TemporaryDirectory() as made:
        _say(here / f"{name}.txt", ["bash", "master-script.sh", *words, "--results-dir", made],
             only_code=True)  # fmt: skip
        for path in sorted(Path(made).rglob("*.csv")):
            kept = here / name / path.parent.relative_to(made) / path.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)


def _say(path, words, only_code=False):
    """Keep a command's exit code and, unless it counts alone, its output without this machine's."""
    code, text = _run(words)
    text = "" if only_code and code == 0 else text
    path.write_text(f"exit code {code}\n{text}", encoding="utf-8")
    sys.stderr.write(f"{path.parent.name}/{path.stem}: exit code {code}\n")


def _run(words):
    python = ROOT / ".venv/bin/python"
    words = [str(python) if word == "python" else word for word in words]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, text=True, timeout=LIMIT_S,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return "none in time", str(error.stdout)
    text = done.stdout.replace(str(ROOT), "CHECKOUT")
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+", "FOLDER", text)
    return done.returncode, text.replace(str(ROOT.parent), "BESIDE")


PARTS = {
    "help": _help,
    "answers": _answers,
    "simulated": _simulated,
    "published": _published,
    "datasets": _datasets,
    "trainers": _trainers,
    "sweeps": _trained_sweeps,
}


def compare(before, after):
    """Lines that say what differs; tables cell by cell, everything else line by line."""
    lines = []
    for part in PARTS:
        one, other = before / part, after / part
        if not one.is_dir() or not other.is_dir():
            lines += [f"{part}: only in {one.parent if one.is_dir() else other.parent}"] * (
                one.is_dir() or other.is_dir()
            )
            continue
        tables = any(one.rglob("*.csv"))
        ignored = _times(one) if part == "sweeps" else ()
        lines += [f"{part}/{line}" for line in differences(one, other, ignored)] if tables else []
        lines += [f"{part}/{line}" for line in _texts(one, other)]
    return lines


def _times(folder):
    """Columns of the tables below a folder that no two runs share."""
    heads = (path.open(encoding="utf-8").readline() for path in folder.rglob("*.csv"))
    return {name for head in heads for name in head.strip().split(",") if NOT_COMPARED.search(name)}


def _texts(one, other):
    names = {path.relative_to(folder) for folder in (one, other) for path in folder.rglob("*")
             if path.is_file() and path.suffix != ".csv"}  # fmt: skip
    for name in sorted(names):
        texts = [(folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
                 if (folder / name).is_file() else [] for folder in (one, other)]  # fmt: skip
        for line in difflib.unified_diff(*texts, "before", "after", lineterm="", n=0):
            if not line.startswith(("---", "+++", "@@")):
                yield f"{name}: {line}"


def main(argv=None):
    """Freeze or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    freezing = commands.add_parser("freeze")
    freezing.add_argument("folder", type=Path)
    freezing.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args(argv)
    if args.command == "freeze":
        freeze(args.folder, args.only)
        return 0
    lines = compare(args.before, args.after)
    sys.stdout.write("".join(f"{line}\n" for line in lines) or "all equal\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
