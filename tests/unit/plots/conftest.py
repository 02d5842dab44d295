"""Tables of sweeps that no machine ran: shapes of what figures must cope with."""

import csv
import math
from itertools import product

import pytest

from configs.study import default_study
from plots.registry import figures
from plots.tables import read_tables

ENGINES = (("stock", 0), ("all-host", 0), ("stride", 2))
FORM = {
    "model": "tiny", "tp": 1, "dp": 1, "micro_batch_size": 1, "accumulation": 1,
    "offload_ratio": 1.0, "subgroup_numel": 100_000_000, "hog_share": 0.0,
}  # fmt: skip
PARAMETERS = {"tiny": 7e6, "7B": 5.95e9, "13B": 11.3e9, "20B": 15.3e9}
RATE = {"stock": 6e6, "all-host": 6e6, "stride": 11e6}
"""Parameters a ms."""


class Sweep:
    """Rows of all tables; :meth:`write` puts them into a folder."""

    def __init__(self):
        self.runs, self.iterations, self.memory, self.monitor = [], [], [], []
        self.comparisons = []

    def add(self, engine="stock", stride=0, *, times=None, iterations=6, **changes):
        """A run and its iterations; ``times=()`` is a run that failed."""
        form = {**FORM, **{k: v for k, v in changes.items() if k in FORM}}
        number = len(self.runs)
        case = ", ".join(str(form[key]) for key in FORM)
        run = {
            "path": f"run-{number}.log", "case": case, "engine": engine, "stride": stride,
            "label": f"{case}, {engine}" + (f" (stride {stride})" if stride else ""),
            "device": "cuda", "hardware": "NVIDIA H100", "status": "ok", "verdict": "trains",
            "source": "measured", "warmup_iterations": 1, **form,
            "global_batch_size": form["micro_batch_size"] * form["dp"] * form["accumulation"],
            "parameters": PARAMETERS.get(form["model"], 1e9), **changes,
        }  # fmt: skip
        update = (run["parameters"] or 1e9) / RATE.get(engine, 6e6)
        own = times if times is not None else [
            self._iteration(run, update, i) for i in range(iterations)
        ]  # fmt: skip
        for i, phases in enumerate(own, 1):
            same = {k: run[k] for k in ("path", "label", "case", "engine", "stride", "source")}
            record = {
                "iteration": i,
                "warmup": int(i == 1),
                "loss": repr(11 - i / 9),
                "tflops": 120,
            }
            self.iterations.append({**same, **record, **phases})
        kept = own[1:]
        run.setdefault("point", run["label"])
        for name in ("iteration_ms", "forward_ms", "backward_ms", "update_ms"):
            known = [row[name] for row in kept if row.get(name) not in (None, "")]
            run.setdefault(name, sum(known) / len(known) if known else "")
        run["timed_iterations"] = len(kept)
        self.runs.append(run)
        return run

    @staticmethod
    def _iteration(run, update, i):
        wobble = 1 + 0.02 * math.sin(3.1 * i) + (2.0 if i == 0 else 0)
        batch = run["micro_batch_size"] * run["accumulation"]
        phases = {
            "forward_ms": 60 * batch * wobble,
            "backward_ms": 300 * batch * wobble / (1.0 if run["engine"] == "stock" else 1.6),
            "update_ms": update * wobble / (1 - 0.4 * run["hog_share"]) / run["dp"],
        }
        return {**phases, "iteration_ms": 1.05 * sum(phases.values())}

    def grid(self, engines=ENGINES, **values):
        """All combinations, engine by engine."""
        for cell in product(*values.values()):
            for engine, stride in engines:
                self.add(engine, stride, **dict(zip(values, cell, strict=True)))
        return self

    def write(self, folder, without=()):
        """Write the tables that have rows; ``without`` leaves columns of runs out."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("runs", "iterations", "memory", "monitor", "comparisons"):
            rows = getattr(self, name)
            columns = list(dict.fromkeys(key for row in rows for key in row if key not in without))
            if name == "iterations" and not rows:
                columns = ["path", "label", "case", "engine", "iteration", "loss"]
            if not columns:
                continue
            with (folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
        return folder


@pytest.fixture
def sweep():
    return Sweep()


@pytest.fixture
def draw(tmp_path):
    """Draws a figure of the default study from a sweep's rows."""
    known = figures(default_study())

    def draw(name, sweep, **options):
        return known[name].draw(read_tables(sweep.write(tmp_path / "tables", **options)))

    return draw
