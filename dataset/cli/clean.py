"""``python -m dataset clean``: a crawl made fit for training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dataset.cli.common import add_input, positive, say, share, tell
from dataset.errors import DatasetError

DESCRIPTION = """\
Writes the texts that pass the chosen steps, in the input's order, with all their fields, and the
counts of every step beside them. Steps run in the order below.
"""


def add(commands: Any) -> None:  # noqa: ANN401
    """Add the command to a parser."""
    parser = commands.add_parser(
        "clean", help="filter a crawl into JSON lines", description=DESCRIPTION, allow_abbrev=False
    )
    parser.set_defaults(run=run, after_interrupt="nothing was written")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="as for prepare")
    add("--output", type=Path, required=True, metavar="F.jsonl[.gz|.xz|.zst]")
    add("--json-key", default="text", metavar="KEY", help="which field is cleaned (text)")
    add_input(parser)
    add = parser.add_argument_group("steps").add_argument
    add("--fix-text", action="store_true", help="mend wrongly decoded text (ftfy)")
    add("--language", nargs="+", metavar="CODE", help="keep these, e.g. en (py3langid)")
    add("--language-confidence", type=share, metavar="SHARE", help="least probability (0.5)")
    add("--decontaminate", nargs="+", type=Path, metavar="FILE",
        help="cut out what shares 13 words in a row with these evaluation texts")  # fmt: skip
    add("--min-words", type=positive, metavar="N", help="drop shorter texts")
    add("--max-words", type=positive, metavar="N", help="drop longer texts")
    add("--near-duplicates", type=share, nargs="?", const=0.8, metavar="SHARE",
        help="of texts with this share of equal five-word stretches keep the first (0.8; "
        "datasketch); needs memory for every text that is kept")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from dataset.clean.run import clean, report_path
    from dataset.clean.steps import CleanSettings
    from dataset.pool import usable_cores
    from dataset.readers import inputs
    from dataset.readers.blocks import Reading

    if arguments.language_confidence is not None and not arguments.language:
        raise DatasetError(
            f"--language-confidence {arguments.language_confidence}: means nothing without "
            "--language"
        )
    settings = CleanSettings(
        key=arguments.json_key,
        fix_text=arguments.fix_text,
        languages=tuple(arguments.language or ()),
        language_confidence=arguments.language_confidence or 0.5,
        min_words=arguments.min_words or 0,
        max_words=arguments.max_words,
        near_duplicates=arguments.near_duplicates,
        decontaminate=tuple(arguments.decontaminate or ()),
    )
    if settings == CleanSettings(key=arguments.json_key):
        tell("no step was chosen: texts are only copied")
    files = inputs.find(arguments.input, arguments.input_format)
    reading = Reading(files, (settings.key,), arguments.sample_by or "document", arguments.part_mb)
    output, workers = arguments.output.absolute(), arguments.workers or usable_cores()
    counts = clean(reading, settings, output, workers, arguments.bad_lines == "fail")
    for name, count in sorted(counts.items()):
        tell(f"{name:28} {count:>12,}")
    tell(f"counts and bad lines: {report_path(output)}")
    say(str(output))
    return 0
