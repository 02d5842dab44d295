"""How fast messages and gradients are compressed and restored, by shape, rank and method.

    python -m benchmarks.compression OUT

Shapes are those of the study's models, methods those of its engines; a CPU gets matrices of fewer
rows, which each line says. OUT is a new folder: ``messages`` and ``gradients`` hold tables as
``python -m parse`` writes them (``runs.csv``: a line a shape, method and rank; ``iterations.csv``:
a line a repeat), and their figures are drawn beside them. Throughput is the bytes of what is
compressed, in its own type, a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from benchmarks.compression_calls import Gradients, Message, made_up, most_allocated_bytes
from benchmarks.report import BenchmarkError, as_table, machine_facts, shown
from benchmarks.timing import Times, in_turns
from configs.errors import ConfigError
from configs.schema import Point
from configs.study import Study, load_study
from launch.trainers.pipeline import PipelineTrainer
from optimus_cc import Settings
from parse.table import STUDY_FILE
from parse.write import replace_text, write_table
from plots.__main__ import main as draw

STUDY = "optimus-cc"
RANKS = (8, 16, 24, 32, 40)
CPU_ROWS = 1024
MOST_CUT = 4
"""Matrices at once, where their rows are cut."""
_EXIT_USAGE = 2
_TEXTS = ("path", "label", "case", "engine", "device", "hardware", "model", "point", "dtype")


class Part(NamedTuple):
    """Something that is compressed, and the names of its two ways of working."""

    folder: str
    setting: str
    """The switch among the settings; the others about it begin with its name."""
    rank: str
    ways: tuple[str, str]
    figure: str


MESSAGES = Part(
    "messages", "inter_grad_comp", "inter_grad_comp_rank", ("compress", "restore"),
    "message-compression",
)  # fmt: skip
GRADIENTS = Part(
    "gradients", "grad_comp", "grad_comp_rank", ("at_once", "one_by_one"), "gradient-compression"
)  # fmt: skip


class Case(NamedTuple):
    """One line of the tables."""

    point: Point
    settings: Settings
    what: str
    """Shape in words, for a figure's panel."""
    whole_bytes: int
    calls: Any
    """A :class:`Message` or :class:`Gradients`."""


def settings_of(point: Point) -> Settings:
    """The compression of a point's engine."""
    return Settings(**PipelineTrainer().ds_config(point).get("optimus_cc", {}))


def methods(study: Study, part: Part, model: str) -> list[str]:
    """Engines that compress, the first of those that do it in the same way."""
    found: dict[Any, str] = {}
    for engine in study.engines:
        settings = settings_of(study.make_point({"model": model, "engine": engine}))
        if not getattr(settings, part.setting):
            continue
        values = dataclasses.asdict(settings)
        own = {k: v for k, v in values.items() if k.startswith(part.setting)}
        found.setdefault((*own.items(), settings.use_error_feedback), engine)
    return list(found.values())


def points(study: Study, part: Part, model: str, ranks: Sequence[int]) -> Iterator[Point]:
    """Points of all methods and ranks; a method without a rank has one."""
    for engine in methods(study, part, model):
        takes_rank = part.rank in study.engines[engine].fields
        for rank in ranks if takes_rank else (None,):
            given = {part.rank: rank} if takes_rank else {}
            yield study.make_point({"model": model, "engine": engine, **given})


def message_cases(
    found: Sequence[Point], device: torch.device, rows: int | None
) -> Iterator[list[Case]]:
    """The message between two stages, cut to some rows where they are given; all in one list."""
    model = found[0].model
    sequence, micro_batch = model.seq_length, found[0].micro_batch_size
    if rows is not None:
        sequence = max(1, min(sequence * micro_batch, rows) // micro_batch)
    shape, dtype = torch.Size((sequence, micro_batch, model.hidden)), _dtype(device)
    message = made_up(shape, dtype, device, seed=1)
    whole = model.seq_length * micro_batch
    cut = "" if sequence == model.seq_length else f" (of {whole})"
    what = f"{model.name}, {sequence * micro_batch}{cut} x {model.hidden}"
    every = [settings_of(point) for point in found]
    yield [
        Case(point, settings, what, message.nbytes, Message(settings, message))
        for point, settings in zip(found, every, strict=True)
    ]


def gradient_cases(
    found: Sequence[Point], device: torch.device, rows: int | None
) -> Iterator[list[Case]]:
    """The feed-forward block's first matrices of a stage, one case at a time for their memory.

    Where rows are given, they are those of some matrices together.
    """
    point = found[0]
    model, whole = point.model, point.model.ffn // point.tp
    count = model.layers_of_stages(point.pp)[0]
    stack = count if rows is None else min(count, MOST_CUT)
    height = whole if rows is None else max(1, min(whole, rows // stack))
    shape = torch.Size((stack, height, model.hidden))
    matrices = made_up(shape, _dtype(device), device, seed=2)
    cut = "" if (stack, height) == (count, whole) else f" (of {count} x {whole})"
    what = f"{model.name}, {stack} x {height}{cut} x {model.hidden}"
    assert dist.group.WORLD is not None
    for point in found:
        settings = settings_of(point)
        calls = Gradients(settings, matrices, dist.group.WORLD)
        yield [Case(point, settings, what, matrices.nbytes, calls)]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Found(NamedTuple):
    """What was measured of a case."""

    case: Case
    times: dict[str, Times]
    """By way."""
    most_bytes: int
    """Allocated at one time in a call of the first way."""
    state_bytes: int
    sent_bytes: int | None


def measure(part: Part, cases: Sequence[Case], device: torch.device, repeats: int) -> list[Found]:
    """Time both ways of each case, all cases in turns, and see what memory a call takes."""

    def finished(work: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return call

    work = {
        f"{number} {way}": finished(getattr(case.calls, way))
        for number, case in enumerate(cases)
        for way in part.ways
    }
    times = in_turns(work, repeats)
    return [
        Found(
            case._replace(calls=None),  # Its tensors are not needed any more.
            {way: times[f"{number} {way}"] for way in part.ways},
            most_allocated_bytes(work[f"{number} {part.ways[0]}"], device),
            case.calls.state_bytes,
            getattr(case.calls, "sent_bytes", None),
        )
        for number, case in enumerate(cases)
    ]


def run_row(part: Part, found: Found, device: torch.device, hardware: str) -> dict[str, Any]:
    """The line of ``runs.csv``: medians, bytes and memory."""
    case, times = found.case, found.times
    rank = getattr(case.settings, part.rank)
    name = f"{case.what}, {case.point.engine}, rank {rank}"
    return {
        **{"path": name, "label": name, "case": case.what, "model": case.what, "point": name},
        **{"engine": case.point.engine, "device": device.type, "hardware": hardware},
        "dtype": str(_dtype(device)).removeprefix("torch."),
        part.rank: rank,
        **{"warmup_iterations": 0, "timed_iterations": len(times[part.ways[0]].seconds)},
        "iteration_ms": 1e3 * sum(taken.median_s for taken in times.values()),
        **{f"{way}_ms": 1e3 * taken.median_s for way, taken in times.items()},
        **{f"{way}_gb_per_s": case.whole_bytes / t.median_s / 1e9 for way, t in times.items()},
        "ratio": times[part.ways[1]].ratio_to(times[part.ways[0]]),
        "whole_bytes": case.whole_bytes,
        "sent_bytes": found.sent_bytes,
        "state_bytes": found.state_bytes,
        "most_allocated_bytes": found.most_bytes,
    }


def repeat_rows(row: dict[str, Any], found: Found) -> Iterator[dict[str, Any]]:
    """The lines of ``iterations.csv``, of which figures take medians and quartiles."""
    seconds = [taken.seconds for taken in found.times.values()]
    for number, taken in enumerate(zip(*seconds, strict=True), 1):
        ways = zip(found.times, taken, strict=True)
        yield {
            **{name: row[name] for name in ("path", "label", "case", "engine")},
            **{"iteration": number, "iteration_ms": 1e3 * sum(taken)},
            **{f"{way}_gb_per_s": row["whole_bytes"] / s / 1e9 for way, s in ways},
        }


def _types(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {name: "string" if name in _TEXTS else "Float64" for name in rows[0]}


def write(
    part: Part, every: Sequence[Found], study: Study, out: Path, device: torch.device
) -> None:
    """Write a part's tables, draw its figure and print it."""
    on_cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if on_cuda else machine_facts()["processor"]
    rows = [run_row(part, found, device, hardware) for found in every]
    pairs = zip(rows, every, strict=True)
    repeats = [line for row, found in pairs for line in repeat_rows(row, found)]
    folder = out / part.folder
    folder.mkdir()
    write_table(folder / "runs.csv", rows, _types(rows))
    write_table(folder / "iterations.csv", repeats, {**_types(repeats), "loss": "string"})
    replace_text(folder / STUDY_FILE, study.as_json() + "\n")
    head = ["what", "method", "rank", *(f"{way} ms (GB/s)" for way in part.ways), "ratio"]
    head += ["sent", "kept MiB", "allocated MiB"]
    lines = [
        [
            *(row["case"], row["engine"], str(row[part.rank])),
            *(f"{row[f'{w}_ms']:.1f} ({row[f'{w}_gb_per_s']:.2f})" for w in part.ways),
            shown(row["ratio"]),
            shown(row["sent_bytes"] and 100 * row["sent_bytes"] / row["whole_bytes"], 1, "%"),
            *(shown(row[name] / 2**20, 2) for name in ("state_bytes", "most_allocated_bytes")),
        ]
        for row in rows
    ]
    sys.stdout.write(f"{as_table(head, lines, (0, 1))}\n")
    if draw([str(folder), "--out", str(out), "--figure", part.figure]):
        raise BenchmarkError(f"{folder}: its figure could not be drawn")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        if given.out.exists():
            raise BenchmarkError(f"{given.out}: already there; give a new folder")
        run(given, load_study(STUDY))
    except (BenchmarkError, ConfigError) as error:
        sys.stderr.write(f"benchmarks.compression: {error}\n")
        return _EXIT_USAGE
    return 0


def run(given: argparse.Namespace, study: Study) -> None:
    """Measure both parts; the folder is made once all models are known to be there."""
    device = torch.device(given.device)
    rows = given.rows or (CPU_ROWS if device.type == "cpu" else None)
    every = {
        (part, model): list(points(study, part, model, given.ranks))
        for part in (MESSAGES, GRADIENTS)
        for model in given.models
    }
    given.out.mkdir(parents=True)
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        for part, cases_of in ((MESSAGES, message_cases), (GRADIENTS, gradient_cases)):
            found = []
            for model in given.models:
                for cases in cases_of(every[part, model], device, rows):
                    found += measure(part, cases, device, given.repeats)
            write(part, found, study, given.out, device)
    finally:
        dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("out", type=Path, help="a new folder")
    add("--models", nargs="+", default=["gpt2-2.5B", "gpt2-8.3B", "gpt2-175B"])
    add("--ranks", nargs="+", type=_positive, default=RANKS)
    add("--rows", type=_positive, help=f"at most, of a message [{CPU_ROWS} on a CPU, else all]")
    add("--repeats", type=_positive, default=5)
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
