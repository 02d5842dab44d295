"""Train with real programs, under stock and under the plugin: ``python tests/programs NAME``.

``nox -s NAME`` makes the environment. Each preset on one and two ranks, or as many as there are
GPUs, if there are any: what the program's state file says of every loss and norm, and every tensor
of the saved model and of DeepSpeed's files, must be the same; or the errors must be those that the
table expects. Writes the program's rows of docs/programs.csv. ``ONLY="z3 offload"`` runs presets
with these words alone.
"""

import csv
import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import inputs
import torch
from safetensors.torch import load_file
from table import EXPECTED, PROGRAMS, STEPS, Run
from train import HAS_GPU

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "programs.csv"
BLOCK = {"enabled": True, "policy": "dynamic", "tile_numel": 4096}
USES, STOCKS = (
    f"deep_optimizer_states: this engine {what}" for what in ("uses the plugin", "is s")
)
ERROR = re.compile(r"^(?:\[rank\d+\]: *)?(?:\w+\.)*(\w*(?:Error|Exception): .+)$", re.M)
OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError")
TIMES = ("runtime", "per_sec", "epoch_time", "memory", "speed", "time", "flos")
LIMIT_S = 900
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
RANKS = [ranks for ranks in (1, 2) if not HAS_GPU or ranks <= torch.cuda.device_count()]
DEVICE = torch.cuda.get_device_name() if HAS_GPU else "CPU"


def leaves(value, path):
    """Every tensor and plain value of a saved object, by its path."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            yield from leaves(part, f"{path}/{key}")
    elif isinstance(value, bool | int | float | str | None):
        yield path, repr(value)


def history(path):
    """What a program logged, without times."""
    if path.suffix == ".csv":
        lines = list(csv.DictReader(path.read_text().splitlines()))
    else:
        lines = json.loads(path.read_text())["log_history"]
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in lines]


def saved(folder, ranks):
    """Path -> value or hash of all that a run left, and what of it there has to be."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in ("trainer_state.json", "metrics.csv"):
            found |= leaves(history(path), name)
        elif path.suffix == ".safetensors":
            found |= leaves(load_file(path), name)
        elif path.name.endswith("_states.pt"):
            found |= leaves(torch.load(path, map_location="cpu", weights_only=False), name)
    for word in ("loss", "grad_norm"):
        values = {value for path, value in found.items() if path.endswith(f"/{word}")} - {"''"}
        assert len(values) >= STEPS - 1, (word, values)
    files = {path.split("/optimizer_state_dict")[0] for path in found if "optim_states.pt" in path}
    assert len({file.split(".pt")[0] for file in files}) >= ranks, files
    assert any("exp_avg" in path for path in found)
    return found


def start(program, ranks, config, with_plugin, folder):
    """Return what a run saved and its error, one of them empty; checks which engine it had."""
    (folder / "ds.json").write_text(json.dumps(config | {"deep_optimizer_states": BLOCK}))
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    log = folder / f"log.{'plugin' if with_plugin else 'stock'}"
    words, variables = program.command(Run(ranks, with_plugin, folder))
    prelude = [] if HAS_GPU else [str(Path(__file__).with_name("prelude"))]
    path = os.pathsep.join([*prelude, str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | VARIABLES | {"PYTHONPATH": path} | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    told = log.read_text()
    errors = [line for line in ERROR.findall(told) if not line.startswith(OF_LAUNCHERS)]
    if process.returncode:
        return {}, errors[-1] if errors else f"exit status {process.returncode}: {told[-3000:]}"
    lines = (told.count(USES), told.count(STOCKS))
    assert lines == (with_plugin, 0), f"engines' lines {lines}: {told[-3000:]}"
    result = saved(folder / "out", ranks)
    shutil.rmtree(folder / "out")
    return result, ""


def compare(name, preset, ranks, folder):
    """Return the outcome's words; raises if it is neither equal nor what is expected."""
    program, config = PROGRAMS[name], PROGRAMS[name].presets[preset]
    if preset in program.shipped:
        file = importlib.metadata.distribution(name).locate_file(program.shipped[preset])
        config = json.loads(Path(file).read_text())
    results, errors = [], []
    for with_plugin in (False, True):
        result, error = start(program, ranks, config, with_plugin, folder)
        results.append(result)
        errors.append(error)
        shutil.rmtree(folder / "out", ignore_errors=True)
    expected = EXPECTED.get((name, preset, ranks), EXPECTED.get((name, preset), ("", "")))
    if tuple(errors) != expected:
        raise AssertionError(f"not expected: {errors}")
    if errors[0]:
        return f"stock ends in `{errors[0]}`" + ("" if errors[0] == errors[1] else f"; {errors[1]}")
    if errors[1]:
        return f"refused: `{errors[1]}`"
    stock, ours = results
    differ = sorted(key for key in stock.keys() | ours.keys() if stock.get(key) != ours.get(key))
    if differ:
        shown = [f"{key}: {stock.get(key)} {ours.get(key)}" for key in differ[:9]]
        raise AssertionError(f"{len(differ)} differ: {shown}")
    return f"equal ({len(stock)} values)"


def version(package):
    return importlib.metadata.version(package)


def write_row(row):
    """Put a row into the table, in the place of the one of the same case."""

    def case(each):
        return tuple(each[name] for name in ("program", "preset", "ranks", "device"))

    with TABLE.open(newline="") as file:
        rows = {case(each): each for each in csv.DictReader(file)} | {case(row): row}
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, row, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[each] for each in sorted(rows))


def main():
    (name,) = sys.argv[1:]
    only, program = os.environ.get("ONLY", ""), PROGRAMS[name]
    used = [name, *sorted({"transformers", "deepspeed"} - {name})]
    versions = ", ".join(f"{each} {version(each)}" for each in used)
    today = datetime.datetime.now(datetime.UTC).date()
    # Its logs stay there, for who has to look into a failure.
    folder = Path(sys.prefix, "run", name)
    shutil.rmtree(folder, ignore_errors=True)
    inputs.write(folder / "inputs")
    failed = []
    for preset in (preset for preset in program.presets if only in preset):
        for ranks in RANKS:
            began = time.monotonic()
            try:
                outcome = compare(name, preset, ranks, folder)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}, {preset}, {ranks} ranks: {error}")
                print(failed[-1], flush=True)
                continue
            row = {
                "program": name,
                "preset": preset,
                "ranks": str(ranks),
                "device": DEVICE,
                "outcome": outcome,
                "minutes": f"{(time.monotonic() - began) / 60:.1f}",
                "date": str(today),
                "versions": versions,
            }
            print(*row.values(), sep=", ", flush=True)
            write_row(row)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
