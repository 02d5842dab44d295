"""The report of a sweep: ``python -m parse.report SWEEP_DIR``, from the repository's root.

Reads every run once and writes the sweep's tables, ``report.md`` and ``report.html`` with the
figures that are drawn. ``--index`` also lists all sweeps of its results folder in their
``index.html``; given the results folder itself, it writes nothing else. Exit code 0 when every
engine is held to be valid against the reference engine (equal to it, for a bitwise gate), 1 when
one is not, 2 when there is no sweep.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from configs.cli import Parser, add_warmup, complain, run_command, say
from configs.fields import shaped_links
from configs.files import read_json, write_json, write_text
from configs.naming import Namer
from configs.study import Study
from parse.compare import (
    NOT_COMPARED,
    Finding,
    PointComparison,
    compare_points,
    setup,
    timed_phases,
    versions,
    write_comparisons,
)
from parse.index import FINDINGS_FILE, MARK, results_folder, write_index
from parse.records import LogError
from parse.render import one_line, render_html, render_markdown
from parse.run import (
    GIB,
    MEASURED,
    PUBLISHED,
    SIMULATED,
    SOURCES,
    SWEEP_FILE,
    PointRuns,
    Run,
    group_points,
    label_runs,
    read_sweep,
)
from parse.stats import INSIDE_A_RUN, LEVEL, RESAMPLES, SEED, Ratio, Spread, spread
from parse.tables import check_our_json, write_tables, writing
from parse.two_runs import ON_CPU, log_notes
from parse.verdict import judge_log

MISSING = "missing"
_TABLES = ("runs", "iterations", "comparisons", "memory", "monitor")
_HEADLINES = 8
"""Comparisons up to which each has its line at the top; more are counted."""
_LARGEST_SVG_BYTES = 1_500_000
"""An SVG beyond this, a scatter of many samples, goes into the page as PNG."""
_NOT_SHOWN = ("iterations", "seed", "data_prefix")
"""Fields that no prediction depends on."""


@dataclass
class ParsedSweep:
    """A sweep whose tables are written, and what its report says of them."""

    folder: Path
    index: dict[str, Any]
    """The object of ``sweep.json``."""
    runs: list[Run]
    findings: list[Finding]
    context: dict[str, Any]
    """What the templates show, figures aside."""

    @property
    def template(self) -> str:
        """Which templates show it."""
        return "report" if all(run.source == MEASURED for run in self.runs) else SIMULATED

    @property
    def all_hold(self) -> bool:
        """Whether every engine is as valid as its study asks for."""
        return all(finding.holds for finding in self.findings)


def parse_sweep(folder: Path, warmup: int = 1) -> ParsedSweep:
    """Write the tables of a sweep folder, and ``findings.json`` for the index and for programs.

    Paths in the tables are relative to the sweep folder, and runs without a log are among them.

    Args:
        folder: ``RESULTS/SWEEP``.
        warmup: First iterations left out of times.

    Raises:
        LogError: the folder holds no sweep with a run in it, or cannot be written.
    """
    if not (folder / SWEEP_FILE).is_file():
        raise LogError(f"{folder}: has no {SWEEP_FILE}; give the folder of a sweep")
    runs, index, out = read_sweep(folder), read_json(folder / SWEEP_FILE), folder / "tables"
    if not runs:
        raise LogError(f"{folder / SWEEP_FILE}: lists no runs, or cannot be read")
    study = label_runs(runs)
    check_our_json(out / FINDINGS_FILE, MARK)
    write_tables(runs, out, warmup, base=folder)
    comparisons = compare_points(runs, warmup)
    write_comparisons(comparisons, study, out)
    measured = all(run.source == MEASURED for run in runs)
    if measured:
        context = _measured_context(folder, index, runs, comparisons, warmup)
    else:
        context = _simulated_context(index, runs, comparisons)
    position = {run.label: number for number, run in enumerate(runs)}
    found = [finding for item in comparisons for finding in item.findings if measured]
    found.sort(key=lambda finding: position.get(finding.label, 0))
    # A loss that failed is told of runs that nothing is compared with, too: the reference's.
    told = {finding.label for finding in found}
    failed = [run for run in runs if run.loss.failed and run.label not in told]
    found += [Finding(run.label, f"the loss is {run.loss.text}", holds=False) for run in failed]
    parsed = ParsedSweep(folder, index, runs, found, context)
    context["name"] = str(index.get("name") or folder.name)
    context["description"] = str(index.get("description") or "")
    with writing(out):
        write_json(out / FINDINGS_FILE, _for_index(parsed))
    return parsed


def _for_index(parsed: ParsedSweep) -> dict[str, Any]:
    context, simulated = parsed.context, parsed.template == SIMULATED
    return {
        MARK: context["name"],
        "description": context["description"],
        "study": context["study"]["name"],
        "source": f"simulated on {context['machine']}" if simulated else context["measured"],
        "runs": f"{len(context['points'])} predicted" if simulated else context["statuses"],
        "state": "" if simulated else "ok" if parsed.all_hold else "bad",
        "headline": context["deviation"] if simulated else context["headline"],
        "findings": [finding._asdict() for finding in parsed.findings],
    }


def write_report(parsed: ParsedSweep) -> None:
    """Write ``report.md`` and ``report.html`` of a sweep, with the figures that are drawn.

    Raises:
        LogError: a figure cannot be read, or the folder cannot be written.
    """
    folder, asked = parsed.folder, parsed.index.get("figures")
    wanted = [str(name) for name in asked] if isinstance(asked, list) else []
    titles = {name: figure.title for name, figure in parsed.runs[0].study.figures.items()}
    on_cpu = bool(parsed.context.get("on_cpu"))
    try:
        figures = find_figures(folder / "figures", wanted, titles, on_cpu=on_cpu)
    except OSError as error:
        raise LogError(f"{error.filename}: cannot be read: {error.strerror}") from None
    context = parsed.context | {
        "figures": figures,
        "not_drawn": sorted(set(wanted) - {entry["figure"] for entry in figures}, key=wanted.index),
        "tables": [name for name in _TABLES if (folder / "tables" / f"{name}.csv").is_file()],
    }
    for name, render in (("report.md", render_markdown), ("report.html", render_html)):
        with writing(folder):
            text = render(context, parsed.template)
            write_text(folder / name, text.encode(errors="replace").decode())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a sweep folder, and say a line for each verdict.

    Raises:
        LogError: there is no sweep.
    """
    parser = Parser("python -m parse.report", "Report a sweep.")
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR")
    add_warmup(parser)
    parser.add_argument(
        "--index",
        action="store_true",
        help="also write index.html of the results folder, or of the folder given",
    )
    args = parser.read(argv)
    if args.index and not (args.sweep_dir / SWEEP_FILE).exists():
        say(str(write_index(args.sweep_dir)))
        return 0
    return report(parse_sweep(args.sweep_dir, args.warmup), index=args.index)


def report(parsed: ParsedSweep, *, index: bool) -> int:
    """Write the report of a sweep, and say its verdicts; returns the exit code.

    Args:
        parsed: The sweep.
        index: Whether to list it in its results folder, too.

    Raises:
        LogError: as :func:`write_report` does.
    """
    write_report(parsed)
    for finding in parsed.findings:
        say(one_line(f"{finding.label}: {finding.verdict}"))
    if index:
        try:
            write_index(results_folder(parsed.folder))
        except LogError as error:  # The report itself is there.
            complain(f"parse.report: no index: {error}")
    return int(not parsed.all_hold)


# What the report of measured runs says


def _measured_context(
    folder: Path,
    index: Mapping[str, Any],
    runs: Sequence[Run],
    comparisons: Sequence[PointComparison],
    warmup: int,
) -> dict[str, Any]:
    groups, study = group_points(runs), runs[0].study
    rows = [_run_row(run, folder, warmup) for run in runs]
    on_cpu = any(run.log.on_cpu for run in runs)
    links = shaped_links(run.fields.get("link_mbit") for run in runs)
    place = "measured on a CPU" if on_cpu else "measured"
    not_run = _not_run(index)
    statuses = Counter(str(row["status"]) for row in rows).most_common()
    ratios = [item.ratio("iteration") for item in comparisons]
    asked_for = [row["engine"] for row in not_run]
    return {
        "study": _study_words(study),
        "warmup": warmup,
        "on_cpu": on_cpu,
        "measured": f"{place}, {links}" if links else place,
        "statuses": ", ".join(f"{n} {word}" for word, n in statuses),
        "headline": _headlines(comparisons, study),
        "phases": timed_phases(study),
        "summary": _summary_rows(groups, comparisons, warmup, asked_for),
        "comparisons": [_comparison_row(item) for item in comparisons],
        "one_run_intervals": any(r is not None and r.covers == INSIDE_A_RUN for r in ratios),
        "verdicts": [(f.label, f.verdict) for item in comparisons for f in item.findings],
        "times": [_times_row(group, warmup) for group in groups],
        "runs": rows,
        "failed": [row for row in rows if row["status"] not in ("ok", "unknown")],
        "not_run": not_run,
        "versions": _joined(
            [versions(run) | {"commit": setup(run).get("commit", "")} for run in runs], ", "
        ),
        "hardware": _joined([dict(_hardware_of(run)) for run in runs], "; "),
        "commands": [(run.label, text) for run in runs if (text := _command_of(run))],
        "notes": [(run.label, note) for run in runs for note in log_notes(run.log)],
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "seed": SEED,
    }


def _study_words(study: Study) -> dict[str, str]:
    return {
        "name": study.name,
        "title": study.title,
        "source": study.source,
        "reference": study.reference,
        "reference_title": study.engines[study.reference].title,
        "gate": study.gate.kind,
        "gate_words": study.gate.words,
    }


def _headlines(comparisons: Sequence[PointComparison], study: Study) -> list[str]:
    """A line for each comparison; of many, how many are equal and a line for those that are not."""
    if len(comparisons) <= _HEADLINES:
        return [_headline(item) for item in comparisons]
    words = Counter(item.equality for item in comparisons)
    shown = ", ".join(f"{n} {word}" for word, n in words.items())
    claimed = sum(not item.withheld for item in comparisons)
    lines = [
        f"{len(comparisons)} points against {study.reference}: {shown}",
        f"speed-ups: {claimed} claimed, {len(comparisons) - claimed} withheld (reasons below)",
    ]
    other = [item for item in comparisons if not all(f.holds for f in item.findings)]
    lines += [_headline(item) for item in other[:_HEADLINES]]
    more = len(other) - _HEADLINES
    return [*lines, f"and {more} more that are not"] if more > 0 else lines


def _headline(item: PointComparison) -> str:
    """A verdict; with the speed-up only where a GPU ran it and the verdict allows it."""
    line = f"{item.ours.label}: {item.verdict}"
    if item.equality == NOT_COMPARED or any(run.log.on_cpu for run in item.ours.runs):
        return line
    return f"{line}; speed-up {_claim(item)}"


def _not_run(index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Points that the sweep asks for and that have fewer runs than repeats."""
    points, runs = (
        [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        for listed in (index.get("points"), index.get("runs"))
    )
    counts = Counter((str(run.get("name")), str(run.get("engine"))) for run in runs)
    found = []
    for point in points:
        name, engine = str(point.get("name")), str(point.get("engine"))
        asked = repeats if isinstance(repeats := point.get("repeats"), int) else 1
        done = counts[name, engine]
        if done < asked:
            found.append({"name": name, "engine": engine, "runs": done, "asked": asked})
    return found


def _summary_rows(
    groups: Sequence[PointRuns],
    comparisons: Sequence[PointComparison],
    warmup: int,
    asked_for: Sequence[str],
) -> list[dict[str, Any]]:
    """One row a case and engine, engines in the study's order.

    An engine that the sweep has elsewhere, or was asked for, has a row in every case.
    """
    study = groups[0].study
    namer = Namer(study)
    compared = {id(item.ours.runs[0]): item for item in comparisons}
    expected = {study.reference, *asked_for, *(str(g.engine) for g in groups if g.engine)}
    cases: dict[str, list[PointRuns]] = {}
    for group in groups:
        cases.setdefault(json.dumps([group.key, group.preferred], default=str), []).append(group)
    titles: Counter[str] = Counter()
    rows = []
    for members in cases.values():
        title = members[0].runs[0].case or "one point"
        titles[title] += 1
        case = title if titles[title] == 1 else f"{title} #{titles[title]}"
        lines = [
            (namer.engine_key(group.runs[0].fields), _summary_row(group, compared, warmup))
            for group in members
        ]
        lines += [
            (namer.engine_key({"engine": name}), {**_NO_RUN, "engine": name})
            for name in expected - {str(group.engine) for group in members}
        ]
        lines.sort(key=lambda line: line[0])
        rows += [{"case": case, **row} for _, row in lines]
    return rows


_NO_RUN = {
    **{"text": MISSING, "state": MISSING, "value": None, "count": "no run"},
    **dict.fromkeys(("iqr", "equality", "speedup"), ""),
}


def _summary_row(
    group: PointRuns, compared: Mapping[int, PointComparison], warmup: int
) -> dict[str, Any]:
    first = group.runs[0]
    found, item = spread(group.times_ms("iteration", warmup)), compared.get(id(first))
    row = {**_NO_RUN, "engine": Namer(group.study).engine(first.fields)}
    row["equality"] = item.equality if item else ""
    bad = [
        run.status if run.status not in ("", "ok") else "no iterations"
        for run in group.runs
        if run not in group.finished
    ]
    if found is None:
        text = ", ".join(dict.fromkeys(bad)) or "no times"
        return {**row, "text": text, "state": "bad", "count": ""}
    counts = [f"{found.iterations} in {found.repeats}"]
    counts += [f"{len(bad)} of {len(group.runs)} {bad[0]}"] if bad else []
    speedup = item.speedup("iteration") if item else None
    wrong = bad or (item and item.equality not in ("equal", "close"))
    return {
        **row,
        "text": f"{found.median_ms:.1f}",
        "state": "bad" if wrong else "ok",
        "value": found.median_ms,
        "iqr": f"{found.iqr_ms:.1f}",
        "count": "; ".join(counts),
        "speedup": "" if speedup is None else f"{speedup:.3f}x",
    }


def _comparison_row(item: PointComparison) -> dict[str, Any]:
    """A point against the reference: ratios of all phases, and the speed-up or why not."""
    ratios = [item.ratio(phase) for phase in timed_phases(item.study)]
    whole = ratios[0]
    return {
        "label": item.ours.label,
        "reference": item.reference.label if item.reference else MISSING,
        "equality": item.equality,
        "ratios": [_ratio_text(ratio) for ratio in ratios],
        "values": [ratio.ratio if ratio else None for ratio in ratios],
        "paired": "" if whole is None or not whole.covers else "yes" if whole.paired else "no",
        "claim": _claim(item),
    }


def _claim(item: PointComparison) -> str:
    """The speed-up with its interval, or why there is none."""
    ratio = item.ratio("iteration")
    if item.speedup("iteration") is None or ratio is None:
        if item.withheld == ON_CPU:
            return f"none claimed: {ON_CPU}"
        return f"withheld: {item.withheld}"
    if ratio.low is None:
        return f"{ratio.ratio:.3f}x (too few iterations for an interval)"
    return f"{ratio.ratio:.3f}x (95% interval {ratio.low:.3f} to {ratio.high:.3f})"


def _times_row(group: PointRuns, warmup: int) -> dict[str, Any]:
    """Statistics of a point's phases over all its finished repeats."""
    phases = timed_phases(group.study)
    spreads = [spread(group.times_ms(phase, warmup)) for phase in phases]
    whole = spreads[0]
    return {
        "label": group.label,
        "spreads": [(_spread_text(s), s.median_ms if s else None) for s in spreads],
        "iterations": whole.iterations if whole else 0,
        "repeats": whole.repeats if whole else 0,
    }


def _run_row(run: Run, folder: Path, warmup: int) -> dict[str, Any]:
    """What became of a run."""
    seconds = run.status_json.get("seconds")
    times = spread([run.times_ms("iteration", warmup)] if run.finished else [])
    last, older = run.status_json.get("last_lines"), run.recorded("older")
    return {
        "label": run.label,
        "status": run.status or "unknown",
        "ok": run.status == "ok",
        "seconds": f"{seconds:.1f}" if isinstance(seconds, int | float) else "",
        "cause": run.cause or (older and f"result of older code: {older}"),
        "iterations": len(run.log.iterations),
        "iteration": _spread_text(times) if times else "",
        "iteration_ms": times.median_ms if times else None,
        "rejects": len(run.log.rejects),
        "loss": judge_log(run.log).text,
        "link": link_to(run.log.path, folder) if run.log.path.is_file() else "",
        "last_lines": [str(line) for line in last] if isinstance(last, list) else [],
    }


def link_to(path: Path, folder: Path) -> str:
    """Return a file as a relative link; empty where it does not lie below the folder.

    Every character that could end the link or make it another scheme is percent-encoded.
    """
    try:
        relative = Path(os.path.normpath(path)).relative_to(os.path.normpath(folder))
        return "./" + quote(os.fsencode(relative.as_posix()))
    except ValueError:
        return ""


def _spread_text(found: Spread | None) -> str:
    """``130.9 (18.5) / 131.2``: median, IQR and mean in ms."""
    if found is None:
        return MISSING
    return f"{found.median_ms:.1f} ({found.iqr_ms:.1f}) / {found.mean_ms:.1f}"


def _ratio_text(ratio: Ratio | None) -> str:
    """``1.392 [1.301, 1.450]``; a star where the interval knows of one repeat alone."""
    if ratio is None:
        return MISSING
    if ratio.low is None:
        return f"{ratio.ratio:.3f}"
    star = "*" if ratio.covers == INSIDE_A_RUN else ""
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{star}"


def _joined(tables: Sequence[dict[str, str]], separator: str) -> list[tuple[str, str]]:
    """Each key with all its values, each value once."""
    values: dict[str, dict[str, None]] = {}
    for key, value in (item for table in tables for item in table.items() if item[1]):
        values.setdefault(key, {})[value] = None
    return [(key, separator.join(found)) for key, found in values.items()]


def _command_of(run: Run) -> str:
    """The command that started a run, ready for a shell; empty when not recorded."""
    command = run.run_json.get("command")
    text = shlex.join(map(str, command)) if isinstance(command, list) else ""
    return "".join(c if c.isprintable() else "?" for c in text)


def _hardware_of(run: Run) -> Iterator[tuple[str, str]]:
    """What a run ran on, row by row."""
    kept, device = run.provenance, run.log.device
    if device:
        yield "model lived on", f"{device} {run.hardware}".strip()
    if isinstance(cpu := kept.get("cpu"), dict):
        yield "CPU", f"{cpu.get('model')}, {cpu.get('cores_usable')} usable cores"
    listed = kept.get("gpus")
    gpus = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
    if gpus:
        yield (
            "GPU",
            ", ".join(
                f"{g.get('name')} ({g.get('memory')}, driver {g.get('driver')})" for g in gpus
            ),
        )
    if isinstance(numa := kept.get("numa"), list) and numa:
        cores = [str(node.get("cores")) for node in numa if isinstance(node, dict)]
        yield "NUMA nodes", f"{len(cores)} (cores {'; '.join(cores)})"
    if isinstance(memory := kept.get("host_memory_bytes"), int):
        yield "host memory", f"{memory / GIB:.1f} GiB"
    if isinstance(data := kept.get("data"), dict) and data.get("source"):
        tokens, file = data.get("tokens"), data.get(".bin")
        size = f"{tokens:,} tokens" if isinstance(tokens, int) else "of no known size"
        digest = file.get("sha256") if isinstance(file, dict) else None
        yield "data", f"{data.get('name')} ({data['source']}), {size}, SHA-256 {digest}"
    yield "platform", str(kept.get("platform") or "")
    reason = run.recorded("dtype_reason")
    yield "type", f"{run.fields.get('dtype', '')}{f', since {reason}' if reason else ''}"
    if links := shaped_links([run.fields.get("link_mbit")]):
        yield "links", f"{links}: what each rank sends, and what it receives"
    yield "ranks", str(run.log.world_size or "")


# What the report of predictions says, with published values where they are known


def _simulated_context(
    index: Mapping[str, Any], runs: Sequence[Run], comparisons: Sequence[PointComparison]
) -> dict[str, Any]:
    about = index.get(SIMULATED)
    about = about if isinstance(about, dict) else {}
    kinds = about.get("kinds")
    kinds = kinds if isinstance(kinds, dict) else {}
    machine = str(about.get("machine") or "")
    ratios = {id(item.ours.runs[0]): item.ratio("iteration") for item in comparisons}
    simulated = [run for run in runs if run.source == SIMULATED]
    pairs = _with_published(simulated, [run for run in runs if run.source == PUBLISHED])
    phases = timed_phases(runs[0].study)
    rows = [("machine", machine), ("rates", str(about.get("machine_source") or ""))]
    rows.append(("software", str(about.get("software") or "")))
    for kind in ("fitted", "assumed"):
        names = [name for name, own in kinds.items() if own == kind]
        rows.append((f"{kind} rates", ", ".join(names)))
    fit = about.get("residuals")
    if isinstance(fit, dict) and {"rows", "median", "worst"} <= fit.keys():
        errors = f"{fit['median']:.1%} in the median, {fit['worst']:.1%} at worst"
        rows.append(("fit", f"{fit['rows']} rows off by {errors}"))
    rows += _shared_rows(simulated)
    return {
        "study": _study_words(runs[0].study),
        "machine": machine or "an unknown machine",
        "about": [(name, text) for name, text in rows if text],
        "phases": phases,
        "points": [_predicted_row(run, phases, ratios.get(id(run))) for run in simulated],
        "beside": pairs,
        "deviation": _deviation(pairs, phases),
        "is_fitted": "fitted" in kinds.values(),
    }


def _shared_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Settings that all points share; what differs is in their names."""
    if not runs:
        return []
    study, same = runs[0].study, []
    for name, row in study.all_fields.items():
        values = {run.settings.get(name) for run in runs}
        if row.only_some_engines or name in _NOT_SHOWN or len(values) > 1:
            continue
        value = values.pop()
        if value is not None and (value or not row.zero):
            same.append(Namer(study).setting(name, value))
    return [("all points", ", ".join(same))]


def _predicted_row(run: Run, phases: Sequence[str], ratio: Ratio | None) -> dict[str, Any]:
    values = read_json(run.log.path)
    memory = (values.get(f"{where}_memory_bytes") for where in ("device", "host"))
    return {
        "label": run.label,
        "times": [_whole(_predicted_ms(run, phase)) for phase in phases],
        "bound": _whole(values.get("bound_ms")),
        "ratio": f"{ratio.ratio:.2f}" if ratio else "",
        "binding": str(values.get("binding") or ""),
        "policy": str(values.get("policy") or ""),
        "memory": [f"{b / GIB:.1f}" if isinstance(b, int | float) else "" for b in memory],
        "ok": run.status == "ok",
        "fits": "yes" if run.status == "ok" else run.cause or run.status,
    }


def _with_published(simulated: Sequence[Run], published: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a published value: predicted, published, and by how much the first is off."""
    own = {run.label: run for run in simulated}
    rows = []
    for run in (run for run in published if run.label in own):
        for phase in timed_phases(run.study):
            theirs, ours = _predicted_ms(run, phase), _predicted_ms(own[run.label], phase)
            if theirs and ours is not None:
                off = ours / theirs - 1
                row = {"label": run.label, "phase": phase, "off": off, "where": run.hardware}
                rows.append(row | {"shown": (_whole(ours), _whole(theirs), f"{off:+.0%}")})
    return rows


def _deviation(rows: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> list[str]:
    """Median and worst deviation, a sentence a phase."""
    found = []
    for phase in phases:
        off = [abs(row["off"]) for row in rows if row["phase"] == phase]
        if off:
            found.append(
                f"{phase}: off by {median(off):.0%} in the median and {max(off):.0%} at worst over "
                f"{len(off)} published value{'' if len(off) == 1 else 's'}"
            )
    return found


def _predicted_ms(run: Run, phase: str) -> float | None:
    return next(iter(run.times_ms(phase, 0)), None)


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else ""


# Figures


def find_figures(
    folder: Path, wanted: Sequence[str], titles: Mapping[str, str], *, on_cpu: bool
) -> list[dict[str, Any]]:
    """Find the figures of a folder: those asked for in their order, then the others by name.

    Args:
        folder: Where they lie.
        wanted: Names of those asked for.
        titles: What figures show, by their names; others go by their name.
        on_cpu: Whether what was measured was measured on a CPU.

    Returns:
        What the templates show of each page of each figure; ``figure`` is its name.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("[!.]*")):
        if path.suffix in (".png", ".svg", ".pdf") and path.is_file():
            found.setdefault(path.stem, {})[path.suffix[1:]] = path
    order = []
    for stem, paths in found.items():
        page = re.fullmatch(r"(?P<figure>.+)-page-(?P<number>\d+)", stem)
        figure, number = (page["figure"], int(page["number"])) if page else (stem, 1)
        if "png" in paths or "svg" in paths:
            rank = wanted.index(figure) if figure in wanted else len(wanted)
            title = titles.get(figure, figure) + (f" (page {number})" if page else "")
            entry = {"figure": figure, "title": title, **_figure_entry(paths, on_cpu)}
            order.append((rank, figure, number, entry))
    return [entry for *_, entry in sorted(order, key=lambda item: item[:3])]


def _figure_entry(paths: Mapping[str, Path], on_cpu: bool) -> dict[str, Any]:
    """What a template shows of a figure, with links relative to the report."""
    links = {kind: f"./figures/{quote(p.name, errors='replace')}" for kind, p in paths.items()}
    description = ""
    if "svg" in paths:
        with paths["svg"].open("rb") as file:
            said = re.search(rb"<desc>(.{1,4000}?)</desc>", file.read(20_000), re.DOTALL)
        words = said[1].decode(errors="replace").split() if said else []
        description = html.unescape(" ".join(words))
    named = re.findall(r"\w+", description.lower())
    source = " and ".join(source for source in SOURCES if source in named) or MEASURED
    small = "svg" in paths and paths["svg"].stat().st_size <= _LARGEST_SVG_BYTES
    in_page = "svg" if small or "png" not in paths else "png"
    kind = "svg+xml" if in_page == "svg" else "png"
    content = base64.b64encode(paths[in_page].read_bytes()).decode("ascii")
    return {
        "source": f"{source} on a CPU" if on_cpu and source == MEASURED else source,
        "description": description,
        "links": links,
        "image": links.get("png") or links["svg"],
        "data_uri": f"data:image/{kind};base64,{content}",
    }


if __name__ == "__main__":
    raise SystemExit(run_command(main, name="parse.report"))
