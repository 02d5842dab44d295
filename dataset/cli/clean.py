"""``python -m dataset clean``: a crawl made fit for training."""

from __future__ import annotations

import argparse
from pathlib import Path

from dataset.cli.common import Commands, megabytes, positive, say, share, tell
from dataset.errors import DatasetError


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add(
        run,
        "nothing was written",
        (
            "clean",
            "filter a crawl into JSON lines",
            "Writes the texts that pass the chosen steps, in the input's order, with all their "
            "fields, and the counts of every step beside them. Steps run in the order below.",
        ),
    )
    add_arguments = parser.add_argument
    add_arguments("--input", nargs="+", required=True, metavar="FILE", help="as for prepare")
    add_arguments("--output", type=Path, required=True, metavar="F.jsonl[.gz|.xz|.zst]")
    add_arguments("--json-key", default="text", metavar="KEY", help="which field is cleaned (text)")
    add_arguments("--input-format", choices=["jsonl", "text", "parquet"])
    add_arguments("--sample-by", choices=["document", "paragraph", "line"], default="document")
    add_arguments("--bad-lines", choices=["skip", "fail"], default="skip")
    add_arguments("--workers", type=positive, help="processes (one a core)")
    add_arguments(
        "--part-mb", type=megabytes, default=4 << 20, metavar="MIB", help=argparse.SUPPRESS
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument("--fix-text", action="store_true", help="mend wrongly decoded text (ftfy)")
    steps.add_argument(
        "--language", nargs="+", metavar="CODE", help="keep these, e.g. en (py3langid)"
    )
    steps.add_argument(
        "--language-confidence", type=share, metavar="SHARE", help="least probability (0.5)"
    )
    steps.add_argument(
        "--decontaminate",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="cut out what shares 13 words in a row with these evaluation texts",
    )
    steps.add_argument("--min-words", type=positive, metavar="N", help="drop shorter texts")
    steps.add_argument("--max-words", type=positive, metavar="N", help="drop longer texts")
    steps.add_argument(
        "--near-duplicates",
        type=share,
        nargs="?",
        const=0.8,
        metavar="SHARE",
        help="of texts with this share of equal five-word stretches keep the first (0.8; "
        "datasketch); needs memory for every text that is kept",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from dataset.clean.run import clean, report_path, write_report
    from dataset.clean.settings import CleanSettings
    from dataset.pool import usable_cores
    from dataset.readers import inputs
    from dataset.readers.blocks import Reading

    if arguments.language_confidence is not None and not arguments.language:
        raise DatasetError(
            f"--language-confidence {arguments.language_confidence}: means nothing without "
            "--language"
        )
    settings = CleanSettings(
        fix_text=arguments.fix_text,
        languages=tuple(arguments.language or ()),
        language_confidence=arguments.language_confidence or 0.5,
        min_words=arguments.min_words or 0,
        max_words=arguments.max_words,
        near_duplicates=arguments.near_duplicates,
        decontaminate=tuple(arguments.decontaminate or ()),
    )
    if settings == CleanSettings():
        tell("no step was chosen: texts are only copied")
    reading = Reading(
        inputs.find(arguments.input, arguments.input_format),
        (arguments.json_key,),
        arguments.sample_by,
        arguments.part_mb,
    )
    output = arguments.output.absolute()
    report = clean(
        reading,
        settings,
        output,
        arguments.workers or usable_cores(),
        arguments.bad_lines == "fail",
    )
    write_report(reading, report, output)
    for name, count in sorted(report.counts.items()):
        tell(f"{name:28} {count:>12,}")
    tell(f"counts and bad lines: {report_path(output)}")
    say(str(output))
    return 0
