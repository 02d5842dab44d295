"""The report of a sweep: ``python -m parse.report SWEEP_DIR``, from the repository's root.

Reads every run once and writes the sweep's tables, ``report.md`` and ``report.html`` with the
figures that are drawn. Exit code 0 when every engine is held to be valid against the reference
engine (equal to it, for a bitwise gate), 1 when one is not, 2 when there is no sweep.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import jinja2
import markupsafe

from configs.cli import Parser, add_warmup, run_command, say
from configs.fields import shaped_links
from configs.files import ROOT, read_json, write_json, write_text
from configs.published import study_folder
from configs.sources import MEASURED, PUBLISHED, SIMULATED, SOURCES
from configs.study import Study
from parse.compare import (
    NOT_COMPARED,
    Finding,
    PointComparison,
    compare_points,
    setup,
    timed_phases,
    write_comparisons,
)
from parse.records import LogError, as_table
from parse.results import results_of
from parse.run import SWEEP_FILE, PointRuns, Run, copies, group_points, label_runs, read_sweep
from parse.stats import INSIDE_A_RUN, LEVEL, RESAMPLES, SEED, Ratio, Spread, spread
from parse.tables import write_tables, writing
from parse.verdict import ON_CPU, log_notes

TEMPLATES = Path(__file__).resolve().parent / "templates"
MISSING = "missing"
FINDINGS_FILE = "findings.json"
"""Beside the tables of a sweep: what the report says, for programs."""
_TABLES = ("runs", "iterations", "comparisons", "memory", "monitor")
_HEADLINES = 8
"""Comparisons up to which each has its line at the top; more are counted."""


@dataclass
class ParsedSweep:
    """A sweep whose tables are written, and what its report says of them."""

    folder: Path
    index: dict[str, Any]
    """The object of ``sweep.json``."""
    runs: list[Run]
    findings: list[Finding]
    context: dict[str, Any]
    """All that the templates show, figures aside."""

    @property
    def all_hold(self) -> bool:
        """True where every engine is as valid as its study asks for."""
        return all(finding.holds for finding in self.findings)


def parse_sweep(folder: Path, warmup: int = 1) -> ParsedSweep:
    """Write the tables of a sweep folder, and ``findings.json`` for programs.

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
    study = label_runs(runs, _asked_fields(index))
    for copy, first in copies(runs):
        first.log.notes.append(f"{copy.log.path} says the same; read once")
        runs = [run for run in runs if run is not copy]
    write_tables(runs, out, warmup, base=folder)
    comparisons = compare_points(runs, warmup)
    write_comparisons(comparisons, study, out)
    found = [finding for item in comparisons for finding in item.findings]
    if any(run.source != MEASURED for run in runs):
        found = []  # a prediction is valid or not by construction
    position = {run.label: number for number, run in enumerate(runs)}
    found.sort(key=lambda finding: position.get(finding.label, 0))
    # A loss that failed is told of runs that nothing is compared with, too: the reference's.
    told = {finding.label for finding in found}
    failed = [run for run in runs if run.loss.failed and run.label not in told]
    found += [Finding(run.label, f"the loss is {run.loss.text}", holds=False) for run in failed]
    parsed = ParsedSweep(folder, index, runs, found, {})
    parsed.context = _context(parsed, comparisons, warmup)
    with writing(out):
        about = {key: parsed.context[key] for key in ("name", "description", "headline")}
        about |= {"study": study.name, "findings": [finding._asdict() for finding in found]}
        about["results"] = parsed.context["results"].as_table()
        write_json(out / FINDINGS_FILE, about)
    return parsed


def write_report(parsed: ParsedSweep) -> None:
    """Write ``report.md`` and ``report.html`` of a sweep, with the figures that are drawn.

    Raises:
        LogError: a figure cannot be read, or the folder cannot be written.
    """
    folder, wanted = parsed.folder, _names(parsed.index, "figures")
    left_out = as_table(parsed.index.get("figures_left_out"))
    titles = {name: figure.title for name, figure in parsed.runs[0].study.figures.items()}
    with writing(folder):
        figures = find_figures(folder / "figures", wanted, titles, parsed.context["measured"])
        drawn = {entry["figure"] for entry in figures}
        context = parsed.context | {
            "figures": figures,
            "not_drawn": [name for name in wanted if name not in drawn],
            "predicted": _predicted(parsed),
            "left_out": [f"{name} ({why})" for name, why in left_out.items()],
            "tables": [name for name in _TABLES if (folder / "tables" / f"{name}.csv").is_file()],
        }
        for name, render in (("report.md", render_markdown), ("report.html", render_html)):
            text = render(context)
            write_text(folder / name, text.encode(errors="replace").decode())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a sweep folder, and say a line for each verdict.

    Raises:
        LogError: there is no sweep.
    """
    parser = Parser("python -m parse.report", "Report a sweep.")
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR")
    add_warmup(parser)
    args = parser.read(argv)
    return report(parse_sweep(args.sweep_dir, args.warmup))


def report(parsed: ParsedSweep) -> int:
    """Write the report of a sweep, and say its verdicts; returns the exit code.

    Raises:
        LogError: as :func:`write_report` does.
    """
    write_report(parsed)
    for finding in parsed.findings:
        say(one_line(f"{finding.label}: {finding.verdict}"))
    say("\n".join(["", *map(one_row, parsed.context["results"].lines()), ""]))
    return int(not parsed.all_hold)


# What the report says


def _context(
    parsed: ParsedSweep, comparisons: Sequence[PointComparison], warmup: int
) -> dict[str, Any]:
    index, runs, study = parsed.index, parsed.runs, parsed.runs[0].study
    rows = [_run_row(run, parsed.folder, warmup) for run in runs]
    about, predicted = as_table(index.get(SIMULATED)), any(r.source != MEASURED for r in runs)
    machine = str(about.get("machine") or "an unknown machine") if predicted else ""
    on_cpu = any(run.log.on_cpu for run in runs)
    links = shaped_links(run.fields.get("link_mbit") for run in runs)
    measured = "measured on a CPU" if on_cpu else MEASURED
    sources = {run.source for run in runs}
    place = " and ".join(measured if one == MEASURED else one for one in SOURCES if one in sources)
    points = group_points(runs)
    ratios = [item.ratios["iteration"] for item in comparisons]
    compared = {id(item.ours.runs[0]): item for item in comparisons}
    beside = _with_published(runs)
    headline = _headlines(comparisons, study.reference)
    return {
        "name": str(index.get("name") or parsed.folder.name),
        "description": str(index.get("description") or ""),
        "set_fields": _set_fields(index),
        "study": study,
        "machine": machine,
        "times": _times(predicted, warmup),
        "on_cpu": on_cpu,
        "measured": ", ".join(filter(None, (place, links))),
        "counts": _counts(rows),
        "headline": _deviation(beside, timed_phases(study)) if predicted else headline,
        "phases": timed_phases(study),
        "results": results_of(points, _names(index, "results"), warmup, comparisons),
        "command": _command(index, study, machine),
        "place": _place(parsed.folder),
        "summary": [_summary_row(point, compared, warmup) for point in points],
        "comparisons": [_comparison_row(item) for item in comparisons],
        "one_run_intervals": any(r is not None and r.covers == INSIDE_A_RUN for r in ratios),
        "has_intervals": any(r is not None and r.low is not None for r in ratios),
        "verdicts": [(finding.label, finding.verdict) for finding in parsed.findings],
        "beside": beside,
        "runs": rows,
        "failed": [row for row in rows if row["is_failed"]],
        "not_run": _not_run(index),
        "setup": [
            *_machine_rows(about),
            *_joined([setup(run) | dict(_conditions(run)) for run in runs]),
        ],
        "notes": [(run.label, note) for run in runs for note in log_notes(run.log)],
        "level": f"{LEVEL:.0%}",
        "resamples": RESAMPLES,
        "seed": SEED,
    }


def _command(index: Mapping[str, Any], study: Study, machine: str) -> str:
    """Return the command that makes a sweep, as from the repository's root."""
    words = ["bash master-script.sh"]
    words += [] if study.is_default else [f"--study {study.name}"]
    words.append(f"--sweep {index.get('name')}")
    words += [f"--simulate --machine {machine}"] if machine else []
    options = _names(as_table(index.get("asked")), "options")
    return " ".join([*words, *([shlex.join(options)] if options else [])])


def _set_fields(index: Mapping[str, Any]) -> str:
    """Fields that the command set in place of the sweep's own, as its options have them."""
    fields = _asked_fields(index).items()
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in fields)


def _asked_fields(index: Mapping[str, Any]) -> dict[str, Any]:
    return as_table(as_table(index.get("asked")).get("fields"))


def _place(folder: Path) -> str:
    """Return a sweep's folder as a command names it from the repository's root."""
    whole = folder.resolve()
    return whole.relative_to(ROOT).as_posix() if whole.is_relative_to(ROOT) else "SWEEP_DIR"


def _names(index: Mapping[str, Any], key: str) -> list[str]:
    listed = index.get(key)
    return [str(name) for name in listed] if isinstance(listed, list) else []


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """``3 runs: 3 ok``; what was not run apart: ``15 simulated: 15 fit; 6 published``."""
    found = []
    for source in SOURCES:
        own = [row for row in rows if row["source"] == source]
        words = Counter(str(row["status"]) for row in own).most_common()
        # Those that a simulation has no failure of have its own word.
        told = ", ".join(f"{n} {'fit' if word == SIMULATED else word}" for word, n in words)
        told = f": {told}" if source != PUBLISHED else ""
        if own:
            found.append(f"{len(own)} {'runs' if source == MEASURED else source}{told}")
    return "; ".join(found)


def _times(predicted: bool, warmup: int) -> str:
    """What the numbers of the table of times are."""
    if predicted:
        return "one iteration each, without checkpoints and evaluations"
    first = "iteration" if warmup == 1 else f"{warmup} iterations"
    return f"median (IQR) / mean over all finished repeats, without the first {first} of each run"


def _headlines(comparisons: Sequence[PointComparison], reference: str) -> list[str]:
    """A line for each comparison; of many, how many are equal and a line for those that are not."""
    if len(comparisons) <= _HEADLINES:
        return [_headline(item) for item in comparisons]
    words = Counter(item.equality for item in comparisons)
    claimed = sum(not item.withheld for item in comparisons)
    other = [item for item in comparisons if not all(f.holds for f in item.findings)]
    more = len(other) - _HEADLINES
    return [
        f"{len(comparisons)} points against {reference}: "
        + ", ".join(f"{n} {word}" for word, n in words.items()),
        f"speed-ups: {claimed} claimed, {len(comparisons) - claimed} withheld (reasons below)",
        *(_headline(item) for item in other[:_HEADLINES]),
        *([f"and {more} more that are not"] if more > 0 else []),
    ]


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


def _summary_row(
    point: PointRuns, compared: Mapping[int, PointComparison], warmup: int
) -> dict[str, Any]:
    """Statistics of a point's phases over all its finished repeats, and what became of it."""
    spreads = [spread(point.times_ms(phase, warmup)) for phase in timed_phases(point.study)]
    item, whole, finished = compared.get(id(point.runs[0])), spreads[0], point.finished
    bad = [run.status for run in point.runs if run not in finished]
    words = [word if word not in ("", "ok") else "no iterations" for word in bad]
    count = f"{whole.iterations} in {whole.repeats}" if whole else "no times"
    failed = [f"{n} of {len(point.runs)} {word}" for word, n in Counter(words).items()]
    holds = item is None or item.equality in ("equal", "close")
    speedup = item.speedup("iteration") if item else None
    is_measured = point.runs[0].source == MEASURED
    if whole and not is_measured:
        count = point.runs[0].source
    return {
        "label": point.label,
        # Green is what was measured and holds.
        "tone": "" if not is_measured else "ok" if whole and holds and not bad else "bad",
        "spreads": [(_spread_text(s), s.median_ms if s else None) for s in spreads],
        "count": "; ".join([count, *failed]),
        "equality": item.equality if item else "",
        "speedup": "" if speedup is None else f"{speedup:.3f}x",
    }


def _comparison_row(item: PointComparison) -> dict[str, Any]:
    """A point against the reference: ratios of all phases, and the speed-up or why not."""
    whole = item.ratios["iteration"]
    return {
        "label": item.ours.label,
        "reference": item.reference.label if item.reference else MISSING,
        "equality": item.equality,
        "ratios": [(_ratio_text(r), r.ratio if r else None) for r in item.ratios.values()],
        "paired": "" if whole is None or not whole.covers else "yes" if whole.paired else "no",
        "claim": _claim(item),
    }


def _claim(item: PointComparison) -> str:
    """The speed-up with its interval, or why there is none."""
    ratio = item.ratios["iteration"]
    if item.speedup("iteration") is None or ratio is None:
        none_on_cpu = f"none claimed: {ON_CPU}"
        return none_on_cpu if item.withheld == ON_CPU else f"withheld: {item.withheld}"
    if ratio.low is None:
        return f"{ratio.ratio:.3f}x (too few iterations for an interval)"
    return f"{ratio.ratio:.3f}x (95% interval {ratio.low:.3f} to {ratio.high:.3f})"


def _run_row(run: Run, folder: Path, warmup: int) -> dict[str, Any]:
    """A row of the table of runs."""
    seconds = run.status_json.get("seconds")
    times = spread([run.times_ms("iteration", warmup)] if run.finished else [])
    last, older = run.status_json.get("last_lines"), run.recorded("older")
    is_failed = run.status not in ("", "ok")
    status = run.status if is_failed or run.source == MEASURED else run.source
    is_ok = run.status == "ok" and run.source == MEASURED
    return {
        "label": run.label,
        "source": run.source,
        "status": status or "unknown",
        "is_failed": is_failed,
        "tone": "bad" if is_failed else "ok" if is_ok else "",
        "seconds": f"{seconds:.1f}" if isinstance(seconds, int | float) else "",
        "cause": run.cause or (older and f"result of older code: {older}"),
        "iterations": len(run.log.iterations),
        "iteration": _spread_text(times) if times else "",
        "iteration_ms": times.median_ms if times else None,
        "rejects": len(run.log.rejects),
        "loss": run.loss.text if run.source == MEASURED else "",
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
    if found.iterations == 1:
        return f"{found.median_ms:.1f}"
    return f"{found.median_ms:.1f} ({found.iqr_ms:.1f}) / {found.mean_ms:.1f}"


def _ratio_text(ratio: Ratio | None) -> str:
    """``1.392 [1.301, 1.450]``; a star where the interval knows of one repeat alone."""
    if ratio is None:
        return MISSING
    if ratio.low is None:
        return f"{ratio.ratio:.3f}"
    star = "*" if ratio.covers == INSIDE_A_RUN else ""
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{star}"


def _joined(tables: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    """Each key with all its values, each value once."""
    values: dict[str, dict[str, None]] = {}
    for key, value in (item for table in tables for item in table.items() if item[1]):
        values.setdefault(key, {})[value] = None
    return [(key, "; ".join(found)) for key, found in values.items()]


def _conditions(run: Run) -> Iterator[tuple[str, str]]:
    """Data, platform, type and links of a run, besides its set-up."""
    data = as_table(run.provenance.get("data"))
    if data.get("source"):
        tokens, digest = data.get("tokens"), as_table(data.get(".bin")).get("sha256")
        size = f"{tokens:,} tokens" if isinstance(tokens, int) else "of no known size"
        yield "data", f"{data.get('name')} ({data['source']}), {size}, SHA-256 {digest}"
    yield "platform", str(run.provenance.get("platform") or "")
    reason = run.recorded("dtype_reason")
    yield "type", f"{run.fields.get('dtype', '')}{f', since {reason}' if reason else ''}"
    if links := shaped_links([run.fields.get("link_mbit")]):
        yield "links", f"{links}: what each rank sends, and what it receives"


def _machine_rows(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """From what a sweep was predicted: ``simulated`` of its index."""
    kinds, fit = as_table(about.get("kinds")), as_table(about.get("residuals"))
    for name, key in (("rates", "machine_source"), ("software", "software")):
        if about.get(key):
            yield name, str(about[key])
    for kind in ("fitted", "assumed"):
        if names := [name for name, own in kinds.items() if own == kind]:
            yield f"{kind} rates", ", ".join(names)
    if {"rows", "median", "worst"} <= fit.keys():
        errors = f"{fit['median']:.1%} in the median, {fit['worst']:.1%} at worst"
        yield (
            "fit",
            f"{fit['rows']} published rows off by {errors}; agreement with them is no proof",
        )


def _with_published(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a published value: predicted, published, and by how much the first is off."""
    own = {json.dumps(run.point): run for run in runs if run.source == SIMULATED}
    rows = []
    for run in runs:
        predicted = own.get(json.dumps(run.point))
        if run.source != PUBLISHED or predicted is None:
            continue
        for phase in timed_phases(run.study):
            theirs, ours = run.times_ms(phase, 0), predicted.times_ms(phase, 0)
            if theirs and ours and theirs[0]:
                off = ours[0] / theirs[0] - 1
                row = {"label": predicted.label, "phase": phase, "off": off, "where": run.hardware}
                rows.append(row | {"shown": (f"{ours[0]:.0f}", f"{theirs[0]:.0f}", f"{off:+.0%}")})
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


# Figures


def find_figures(
    folder: Path, wanted: Sequence[str], titles: Mapping[str, str], source: str
) -> list[dict[str, Any]]:
    """Find the figures of a folder: those asked for in their order, then the others by name.

    Args:
        folder: Where they lie.
        wanted: Names of those asked for.
        titles: What figures show, by their names; others go by their name.
        source: Where figures come from that do not say it themselves.

    Returns:
        What the templates show of each figure; ``figure`` is its name.
    """
    places = {name: place for place, name in enumerate(wanted)}
    found = sorted(
        folder.glob("[!.]*.png"), key=lambda path: (places.get(path.stem, len(wanted)), path.stem)
    )
    return [
        {
            "figure": path.stem,
            "title": titles.get(path.stem, path.stem),
            **_figure_entry(path, source),
        }
        for path in found
    ]


def _predicted(parsed: ParsedSweep) -> list[dict[str, Any]]:
    """Describe the study's own figure, in its default sweep where no GPU measured anything.

    That is what the study ships, and the same figure of each machine for which it was simulated
    beside this sweep's folder, such as the user's own.
    """
    study, published = parsed.runs[0].study, parsed.runs[0].study.published
    is_default = parsed.context["name"] == study.default_sweep and parsed.context["on_cpu"]
    if published is None or not published.figure or not is_default:
        return []
    shipped = study_folder(study)
    places = [shipped / "predicted.svg"] if shipped else []
    own = f"simulated-*/{published.figure}/figures/{published.figure}.svg"
    places += sorted(parsed.folder.resolve().parent.glob(own))
    return [
        {
            **_figure_entry(path, SIMULATED),
            "figure": "",
            "machine": "" if path.parent == shipped else path.parts[-4].removeprefix("simulated-"),
        }
        for path in places
        if path.is_file()
    ]


def _numbers(table: Path) -> list[list[str]]:
    """Rows of the table of a figure's numbers, without its head; none where there is none."""
    try:
        return list(csv.reader(table.read_text(encoding="utf-8").splitlines()))[1:]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _figure_entry(png: Path, source: str) -> dict[str, Any]:
    """Describe a figure for the templates, with links relative to the report."""
    files = [
        path for kind in ("png", "pdf", "svg") if (path := png.with_suffix(f".{kind}")).is_file()
    ]
    is_svg = files[-1].suffix == ".svg"
    svg = files[-1].read_bytes() if is_svg else b""
    said = re.search(rb"<dc:description>(.{1,4000}?)</", svg[:20_000], re.DOTALL)
    description = html.unescape(" ".join(said[1].decode(errors="replace").split())) if said else ""
    named = re.findall(r"\w+", description.lower())
    sources = [word for word in SOURCES if word in named]
    data = base64.b64encode(svg or png.read_bytes()).decode("ascii")
    return {
        "source": source if sources in ([], [MEASURED]) else " and ".join(sources),
        "description": description,
        "links": {p.suffix[1:]: f"./figures/{quote(p.name, errors='replace')}" for p in files},
        "data_uri": f"data:image/{'svg+xml' if is_svg else 'png'};base64,{data}",
        "numbers": _numbers(png.with_suffix(".csv")),
    }


# Pages. Everything that comes from a log, a name or a path is escaped by the template engine; links
# are relative and percent-encoded; and a policy in the page itself allows no script or style but
# ours, by their hashes, and no request at all.


def render_html(context: dict[str, Any]) -> str:
    """Return one page that works offline, with style, script and figures in it."""
    style, script = (
        markupsafe.Markup((TEMPLATES / name).read_text(encoding="utf-8"))
        for name in ("report.css", "report.js")
    )
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
        for text in (style, script)
    ]
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; "
        f"script-src 'sha256-{hashes[1]}'; base-uri 'none'; form-action 'none'"
    )
    more = {"style": style, "script": script, "policy": policy}
    return _render("report.html.j2", context | more, autoescape=True, line=one_line)


def render_markdown(context: dict[str, Any]) -> str:
    """Return the same for a repository; what logs say is escaped by the filter ``text``."""
    filters = {"text": _escape, "code": lambda text: one_row(str(text)).replace("`", "'")}
    return _render("report.md.j2", context, autoescape=False, **filters).rstrip("\n") + "\n"


def _render(
    name: str, context: dict[str, Any], *, autoescape: bool, **filters: Callable[[Any], str]
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=autoescape,
    )
    environment.filters |= filters
    return environment.get_template(name).render(context)


def _escape(text: object) -> str:
    """Plain text for Markdown, safe inside a table's cell."""
    line = one_line("" if text is None else text)
    # A reader of Markdown decodes entities, so that "&lt;" would come out as "<".
    for character in "\\`*_[]|<>&":
        line = line.replace(character, f"\\{character}")
    return line


def one_row(text: str) -> str:
    """Return a line of a table, blanks at its begin kept, as :func:`one_line` does others."""
    return one_line(f".{text}")[1:]


def one_line(text: object) -> str:
    """Return text without line breaks, control characters or marks that turn its direction."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()


if __name__ == "__main__":
    raise SystemExit(run_command(main, name="parse.report"))
