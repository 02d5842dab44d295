"""``python -m optimus_cc predict``: an iteration's time scheme by scheme, simulated."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc.predict import schemes
from optimus_cc.predict.cluster import ELEMENT_BYTES, load_cluster, load_model
from optimus_cc.predict.fit import Run, ethernet, fit, read_run, with_compression
from optimus_cc.predict.pipeline import Links, Prediction, Span, Times, predict
from optimus_cc.predict.workload import PredictionError, Workload
from optimus_cc.settings import Settings, SettingsError

_NUMBERS = ("inter_grad_comp_rank", "grad_comp_rank", "selective_grad_comp_way")
_EPILOG = f"""\
schemes: {", ".join(schemes.PARTS)}, and several with '+' between them; 'all' is
{", ".join(schemes.ALL)}.
Nothing is run: every time is simulated. SC is taken as after its warm-up. With --run, computing is
fitted to a run on links as they are, and no shaped run is looked at, but to print --compare."""


@dataclass(frozen=True)
class _Case:
    """What the schemes are compared on."""

    workload: Workload
    times: Callable[[Settings], Times]
    links: dict[str, Links]
    source: str


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print.

    Returns:
        The exit status: 0, or 2 for a wrong argument.
    """
    given = _parser().parse_args(argv)
    try:
        case, runs = _of_runs(given) if given.run else (_of_cluster(given), [])
        spans: list[Span] = []
        rows = [*_rows(case, _settings(given, runs), spans), *_compared(case, given)]
        if given.timeline:
            given.timeline.write_text(json.dumps(_timeline(spans)), encoding="utf-8")
    except (PredictionError, SettingsError, OSError) as error:
        sys.stderr.write(f"predict: {error}\n")
        return 2
    sys.stdout.write(_text(given, case, rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optimus_cc predict",
        description="Predict an iteration of 1F1B with compressed communication.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="a model's name or TOML file, as `2.5B`")
    add("--cluster", default="a100x64", help="a cluster's name or TOML file [a100x64]")
    add("--links", type=_rates, metavar="GBIT,...", help="a node's link, Gb/s [the cluster's own]")
    add("--dtype", choices=ELEMENT_BYTES, default="fp32", help="of the model [fp32, as published]")
    text = "shards of a node send a message once between them, not each its copy as here"
    add("--scatter-gather", action="store_true", help=text)
    text = "folders of runs on links as they are; the first gives the times of computing, the "
    text += "first that compressed those of compression"
    add("--run", type=Path, nargs="+", metavar="FOLDER", help=text)
    add("--link-mbit", type=_rates, metavar="MBIT,...", help="with --run: each rank's own link")
    add("--cores", type=int, metavar="N", help="with --run: cores its ranks shared [as recorded]")
    text = "with --run: shaped runs, printed beside their predictions"
    add("--compare", type=Path, nargs="+", default=[], metavar="FOLDER", help=text)
    add("--scheme", default="all", help="schemes, with ',' between them [all]")
    for name in _NUMBERS:
        add(f"--{name}", type=int, help=f"[--run's own, or {getattr(Settings(), name)}]")
    add("--json", action="store_true", help="print JSON")
    add("--csv", action="store_true", help="print CSV")
    add("--markdown", action="store_true", help="print tables as docs/optimus_cc.md has them")
    text = "write what every rank computes, of the first scheme and link, as a Chrome trace"
    add("--timeline", type=Path, metavar="FILE", help=text)
    return parser


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: give positive rates, as 0.1,1,10")
    return rates


def _of_cluster(given: argparse.Namespace) -> _Case:
    if not given.model:
        raise PredictionError("--model or --run: give one of them, such as --model 8.3B")
    if given.link_mbit or given.compare or given.cores:
        raise PredictionError("--link-mbit, --compare and --cores go with --run; add it")
    cluster = load_cluster(given.cluster)
    workload = cluster.workload(load_model(given.model), given.dtype)
    copies = 1 if given.scatter_gather else workload.tp
    return _Case(
        workload,
        lambda settings: cluster.times(workload, settings, given.dtype),
        {
            f"{gbit:g} Gb/s": cluster.links(gbit, copies)
            for gbit in given.links or [cluster.link_gbit]
        },
        f"{cluster.name}: {cluster.source}",
    )


def _of_runs(given: argparse.Namespace) -> tuple[_Case, list[Run]]:
    if given.model or given.links or given.scatter_gather:
        raise PredictionError(
            "--model, --links and --scatter-gather go with --cluster; with --run give --link-mbit"
        )
    runs = [read_run(path) for path in given.run]
    base = runs[0]
    for run in runs[1:]:
        if run.workload != base.workload:
            raise PredictionError(f"{run.path}: another workload than {base.path}; give it apart")
    cores = given.cores or base.cores
    if cores < 1:
        raise PredictionError(f"{base.path}: cores_usable is not recorded; give --cores")
    fits = [fit(run, cores) for run in runs]
    compressing = [f for f, r in zip(fits, runs, strict=True) if r.compresses]
    flops_per_s = (compressing or fits)[0].compression_flops_per_s
    return _Case(
        base.workload,
        lambda settings: with_compression(fits[0].times, base.workload, settings, flops_per_s),
        {f"{mbit:g} Mbit/s": ethernet(mbit) for mbit in given.link_mbit or []},
        f"computing fitted to {base.path} ({cores} cores), compression to "
        + (str(runs[fits.index(compressing[0])].path) if compressing else "its rate of computing")
        + "; 0.956 of a link for payload, buckets of 15 KiB",
    ), runs


def _settings(given: argparse.Namespace, runs: list[Run]) -> dict[str, Settings]:
    """Settings by scheme; numbers are those given, or of the last run that has them."""
    numbers = {name: getattr(given, name) for name in _NUMBERS}
    for name in _NUMBERS:
        own = {getattr(run.settings, name) for run in runs} - {getattr(Settings(), name)}
        if numbers[name] is None:
            numbers[name] = min(own, default=getattr(Settings(), name))
    names = schemes.ALL if given.scheme == "all" else given.scheme.split(",")
    return {name: schemes.settings_of(name, **numbers) for name in names}


def _rows(
    case: _Case, settings: dict[str, Settings], spans: list[Span]
) -> Iterator[dict[str, Any]]:
    """Scheme by scheme and link by link; the spans of the first are kept."""
    for link, links in case.links.items():
        found: dict[str, Prediction] = {}
        for scheme, chosen in settings.items():
            found[scheme] = predict(case.workload, chosen, case.times(chosen), links)
        spans.extend([] if spans else next(iter(found.values())).spans)
        first, best = next(iter(found.values())), min(p.iteration_s for p in found.values())
        for scheme, one in found.items():
            sent = {f"{kind}_mb": round(n / 1e6, 3) for kind, n in one.sent_bytes.items()}
            yield {
                "kind": "simulated",
                "link": link,
                "scheme": scheme,
                "iteration_ms": round(one.iteration_s * 1e3, 1),
                "times_faster": round(first.iteration_s / one.iteration_s, 3),
                "best": "best" if one.iteration_s == best else "",
                **sent,
            }


def _compared(case: _Case, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Shaped runs beside their predictions."""
    for path in given.compare:
        run = read_run(path)
        if run.workload != case.workload or not run.link_mbit:
            raise PredictionError(
                f"{path}: link_mbit = {run.link_mbit:g}: --compare takes runs on shaped links of "
                f"the workload of {given.run[0]}"
            )
        times = case.times(run.settings)
        one = predict(case.workload, run.settings, times, ethernet(run.link_mbit))
        yield {
            "kind": "simulated, measured",
            "link": f"{run.link_mbit:g} Mbit/s",
            "scheme": run.engine,
            "iteration_ms": round(one.iteration_s * 1e3, 1),
            "measured_ms": round(run.iteration_s * 1e3, 1),
            "error": f"{one.iteration_s / run.iteration_s - 1:+.1%}",
            "same_bytes": one.sent_bytes == run.sent_bytes,
            "run": str(path),
        }


def _text(given: argparse.Namespace, case: _Case, rows: list[dict[str, Any]]) -> str:
    if given.json:
        document = {"schema_version": 1, "simulated": True, "source": case.source, "rows": rows}
        return json.dumps(document, indent=2) + "\n"
    names = list(dict.fromkeys(name for row in rows for name in row))
    if given.csv:
        out = io.StringIO()
        writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    if given.markdown:
        return markdown(case.workload, rows)
    lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [
        "  ".join(w.ljust(n) for w, n in zip(row, widths, strict=True)).rstrip() for row in lines
    ]
    w = case.workload
    head = (
        f"simulated, not run: {w.model.name}, pp {w.pp}, dp {w.dp}, tp {w.tp}, "
        f"{w.num_micro_batches} micro-batches of {w.micro_batch_size} x {w.model.seq_length} tokens"
    )
    return "\n".join([head, case.source, "", *body]) + "\n"


def markdown(workload: Workload, rows: Sequence[dict[str, Any]]) -> str:
    """Tables with a row for each scheme and a column for each link.

    Args:
        workload: what was predicted.
        rows: as :func:`main` prints them.

    Returns:
        A table of predictions, and one of shaped runs beside theirs; an empty line between them.
    """
    predicted = [row for row in rows if "measured_ms" not in row]
    shaped = [row for row in rows if "measured_ms" in row]
    tables = [
        _table(workload, "seconds, simulated (times as fast)", predicted, _seconds),
        _table(workload, "ms, measured / simulated / error", shaped, _beside),
    ]
    return "\n".join(filter(None, tables))


def _table(
    w: Workload, what: str, rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]
) -> str:
    """One table; empty without rows."""
    if not rows:
        return ""
    cells = {(row["scheme"], row["link"]): cell(row) for row in rows}
    names, links = (list(dict.fromkeys(words)) for words in zip(*cells, strict=True))
    lines = [
        [f"{w.model.name}, PP {w.pp}, DP {w.dp}, TP {w.tp}: {what}", *links],
        ["---"] * (len(links) + 1),
        *([scheme, *(cells.get((scheme, link), "") for link in links)] for scheme in names),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seconds(row: dict[str, Any]) -> str:
    text = f"{row['iteration_ms'] / 1e3:.4g} ({row['times_faster']:.3f})"
    return f"**{text}**" if row["best"] else text


def _beside(row: dict[str, Any]) -> str:
    measured, simulated = round(row["measured_ms"]), round(row["iteration_ms"])
    return f"{measured} / {simulated} / {simulated / measured - 1:+.0%}"


def _timeline(spans: list[Span]) -> list[dict[str, Any]]:
    """Chrome's trace events, a thread a rank, in microseconds."""
    return [
        {"ph": "X", "name": f"{name} (simulated)", "pid": 0, "tid": rank, "ts": begin_s * 1e6,
         "dur": (end_s - begin_s) * 1e6}
        for rank, name, begin_s, end_s in spans
    ]  # fmt: skip
