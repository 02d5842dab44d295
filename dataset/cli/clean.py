"""``python -m dataset clean``: a crawl made fit for training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset.cli.common import add_input, count, positive, say, share, tell, tell_counts
from dataset.errors import DatasetError

if TYPE_CHECKING:
    from dataset.clean.steps import CleanSettings

DESCRIPTION = """\
Writes the texts that pass the chosen steps, in the input's order, with all their fields, and the
counts of every step beside them. Steps run in the order below.
"""
# What Megatron's OpenWebText recipe asks for, before its shuffling and after it.
PRESETS: dict[str, dict[str, Any]] = {
    "openwebtext": {
        "fix_text": True,
        "language": ["en"],
        "min_words": 128,
        "min_chars": 512,
        "near_duplicates": 0.9,
    },
    "openwebtext-tasks": {"ngram_whole_sentences": True, "ngram_max_matches": 10},
}
# Options by the fields that they set.
NGRAMS = {
    "words": "ngram_words",
    "fewest_words": "ngram_fewest_words",
    "margin_characters": "ngram_margin",
    "shortest_characters": "ngram_shortest",
    "most_pieces": "ngram_most_pieces",
    "whole_sentences": "ngram_whole_sentences",
    "max_matches": "ngram_max_matches",
}
SKETCH = {"permutations": "permutations", "shingle_words": "shingle_words", "seed": "minhash_seed"}
# What these are about; without it they mean nothing.
NEEDED = {
    "language": ["language_confidence"],
    "near_duplicates": ["load_fingerprints", "save_fingerprints", "groups", *SKETCH.values()],
    "decontaminate": ["decontaminate_keys", *NGRAMS.values()],
}


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
    add("--id-key", default="id", metavar="KEY", help="which field names a text (id)")
    add("--preset", choices=sorted(PRESETS),
        help="what Megatron's OpenWebText recipe asks for before its shuffling: --fix-text "
        "--language en --min-words 128 --min-chars 512 --near-duplicates 0.9; or after it, with "
        "--decontaminate: --ngram-whole-sentences --ngram-max-matches 10; options that are given "
        "go before it")  # fmt: skip
    add_input(parser)
    add = parser.add_argument_group("steps").add_argument
    add("--remove-groups", nargs="+", type=Path, metavar="FILE",
        help="drop the duplicates that --groups listed")  # fmt: skip
    add("--fix-text", action="store_true", help="mend wrongly decoded text (ftfy)")
    add("--language", nargs="+", metavar="CODE", help="keep these, e.g. en (py3langid)")
    add("--language-confidence", type=share, metavar="SHARE", help="least probability (0.5)")
    add("--decontaminate", nargs="+", type=Path, metavar="FILE",
        help="cut out what shares 13 words in a row with these evaluation texts")  # fmt: skip
    add("--min-chars", type=positive, metavar="N", help="drop texts of fewer characters")
    add("--min-words", type=positive, metavar="N", help="drop shorter texts")
    add("--max-words", type=positive, metavar="N", help="drop longer texts")
    add("--near-duplicates", type=share, nargs="?", const=0.8, metavar="SHARE",
        help="of texts with this share of equal five-word stretches keep the first (0.8; "
        "datasketch); needs memory for every text that is kept")  # fmt: skip
    _add_details(parser)


def _add_details(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("with --decontaminate").add_argument
    add("--decontaminate-keys", nargs="+", metavar="KEY",
        help="fields of its files, each a text by itself (that of --json-key)")  # fmt: skip
    add("--ngram-words", type=positive, metavar="N", help="equal words in a row (13)")
    add("--ngram-fewest-words", type=positive, metavar="N",
        help="shorter evaluation texts count as a whole from here (8)")  # fmt: skip
    add("--ngram-margin", type=count, metavar="CHARS", help="cut on either side too (200)")
    add("--ngram-shortest", type=count, metavar="CHARS", help="drop shorter stretches (200)")
    add("--ngram-most-pieces", type=positive, metavar="N",
        help="drop what falls into more pieces (10)")  # fmt: skip
    add("--ngram-whole-sentences", action="store_true", help="cut up to the ends of sentences")
    add("--ngram-max-matches", type=positive, metavar="N",
        help="leave in what the input holds N times or more: a common phrase (none is); reads the "
        "input twice")  # fmt: skip
    add = parser.add_argument_group("with --near-duplicates").add_argument
    add("--groups", type=Path, metavar="F.jsonl",
        help="write which text stayed and which went because of it")  # fmt: skip
    add("--save-fingerprints", type=Path, metavar="FILE", help="of the texts that stay")
    add("--load-fingerprints", nargs="+", type=Path, action="extend", metavar="FILE",
        help="what is like texts of earlier runs goes, too")  # fmt: skip
    add("--shingle-words", type=positive, metavar="N", help="words of a stretch (5)")
    add("--permutations", type=positive, metavar="N", help="values of a fingerprint (128)")
    add("--minhash-seed", type=count, metavar="N", help="which permutations (1)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from dataset.clean.run import Memory, clean
    from dataset.pool import usable_cores
    from dataset.readers import inputs
    from dataset.readers.blocks import Reading

    for name, value in PRESETS.get(arguments.preset, {}).items():
        if not getattr(arguments, name):
            setattr(arguments, name, value)
    for needed, names in NEEDED.items():
        for name in names:
            value = getattr(arguments, name)
            is_given = value is not None and value is not False
            if is_given and not getattr(arguments, needed):
                shown = "" if value is True else f" {_shown(value)}"
                raise DatasetError(
                    f"--{name.replace('_', '-')}{shown}: means nothing without "
                    f"--{needed.replace('_', '-')}"
                )
    settings = _settings(arguments)
    files = inputs.find(arguments.input, arguments.input_format)
    reading = Reading(files, (settings.key,), arguments.sample_by or "document", arguments.part_mb)
    output, workers = arguments.output.absolute(), arguments.workers or usable_cores()
    memory = Memory(
        tuple(arguments.load_fingerprints or ()),
        arguments.save_fingerprints and arguments.save_fingerprints.absolute(),
        arguments.groups and arguments.groups.absolute(),
    )
    counts = clean(reading, settings, output, workers, arguments.bad_lines == "fail", memory)
    tell_counts(counts, output)
    say(str(output))
    return 0


def _settings(arguments: argparse.Namespace) -> CleanSettings:
    from dataset.clean.contamination import Ngrams
    from dataset.clean.duplicates import Sketch
    from dataset.clean.steps import CleanSettings

    def given(options: dict[str, str]) -> dict[str, Any]:
        values = {field: getattr(arguments, option) for field, option in options.items()}
        return {field: value for field, value in values.items() if value is not None}

    ngrams = Ngrams(**given(NGRAMS))
    if ngrams.fewest_words > ngrams.words:
        raise DatasetError(
            f"--ngram-fewest-words {ngrams.fewest_words}: more than --ngram-words {ngrams.words}"
        )
    settings = CleanSettings(
        key=arguments.json_key,
        id_key=arguments.id_key,
        remove_groups=tuple(arguments.remove_groups or ()),
        fix_text=arguments.fix_text,
        languages=tuple(arguments.language or ()),
        language_confidence=arguments.language_confidence or 0.5,
        min_words=arguments.min_words or 0,
        max_words=arguments.max_words,
        min_characters=arguments.min_chars or 0,
        near_duplicates=arguments.near_duplicates,
        sketch=Sketch(**given(SKETCH)),
        needs_names=bool(arguments.groups),
        decontaminate=tuple(arguments.decontaminate or ()),
        decontaminate_keys=tuple(arguments.decontaminate_keys or ()),
        ngrams=ngrams,
    )
    if settings == CleanSettings(key=settings.key, id_key=settings.id_key):
        tell("no step was chosen: texts are only copied")
    return settings


def _shown(value: Any) -> str:  # noqa: ANN401
    return " ".join(map(str, value if isinstance(value, list) else [value]))
