"""What work in backward is predicted to bring: ``python -m benchmarks.predicted_iterations``.

Simulated, on profiles whose rates are fitted or assumed (docs/prediction.md); nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import ModelShape, load_model
from deep_optimizer_states.predict.predict import Prediction, predict
from deep_optimizer_states.predict.workload import STOCK, Workload

SHAPE_14B = ModelShape("14B", 5120, 13824, 48, 40, 8, vocab_size=152064)
"""Sizes of a published model of 14.8 billion parameters."""
CASES: Sequence[tuple[str, str, int]] = (
    *(("7B", "h200x1", batch) for batch in (1, 4)),
    *(("13B", "h200x1", batch) for batch in (1, 4)),
    *(("20B", "h200x1", batch) for batch in (1, 4)),
    *(("7B", "h100x4", batch) for batch in (1, 4)),
    *(("13B", "h100x4", batch) for batch in (1, 4)),
    *(("20B", "h100x4", batch) for batch in (1, 4)),
    *(("14B", "h200x8", batch) for batch in (1, 4)),
)
"""Model, machine, samples a rank handles at once."""
WAYS: Mapping[str, dict[str, Any]] = {
    "stock": {"software": STOCK},
    "after the norm": {},
    "prefetched": {"prefetch_memory_bytes": "auto"},
    "before the norm": {"step_before_norm": True},
    "both": {"step_before_norm": True, "prefetch_memory_bytes": "auto"},
}


def predicted(model: str, machine: str, batch: int) -> dict[str, Prediction]:
    """One case in every way."""
    shape = SHAPE_14B if model == SHAPE_14B.name else load_model(model)[0]
    profile = load_machine(machine)
    common: dict[str, Any] = {"dp": profile.gpus, "micro_batch_size": batch}
    return {name: predict(Workload(shape, **common, **way), profile) for name, way in WAYS.items()}


def rows(cases: Sequence[tuple[str, str, int]] = CASES) -> Iterator[list[str]]:
    """Cells of the table, the last of each row the bound."""
    for model, machine, batch in cases:
        found = predicted(model, machine, batch)
        bound_s = min(prediction.bound_s for prediction in found.values())
        mark = "" if found["after the norm"].fits else " †"
        cells = [
            f"{prediction.iteration_s:.2f}"
            + ("" if name == "stock" else f", {bound_s / prediction.iteration_s:.0%}")
            for name, prediction in found.items()
        ]
        yield [f"{model}{mark}", f"`{machine}`", str(batch), *cells, f"{bound_s:.2f}"]


def table(cases: Sequence[tuple[str, str, int]] = CASES) -> str:
    """The table in Markdown."""
    head = ["model", "machine", "micro-batch", *WAYS, "bound"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(cases)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.predicted_iterations", description=__doc__
    ).parse_args(argv)
    sys.stdout.write(table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
