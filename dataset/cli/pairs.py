"""Commands about pairs that are there: ``inspect``, ``merge`` and ``find``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset import manifest
from dataset.alive import alive
from dataset.cli.common import merged_prefix, prefix, say, tell
from dataset.default import cache
from dataset.errors import DatasetError
from dataset.files import visible

if TYPE_CHECKING:
    from dataset.tokenizer.choose import Tokenizer

EMBEDDED, OSCAR = "embedded", "oscar-1gb"
FOUND_DAMAGE = NOT_PREPARED = 1

INSPECT = """\
Shows documents, tokens and the beginning of a document, and checks the files. Exit code 1 means
damage was found. A pair that `prepare` did not make brings no tokenizer; give one to see its text.
"""
MERGE = """\
Writes one pair with the documents of all, in the order given, and prints its prefix. The pairs
stay.
"""
FIND = """\
Prints the prefix of the data, or nothing and exit code 1 when `prepare` has not made it; nothing
is fetched or built.
"""


def add(commands: Any) -> None:  # noqa: ANN401
    """Add the commands to a parser."""
    parser = commands.add_parser(
        "inspect", help="show and check a .bin/.idx pair", description=INSPECT, allow_abbrev=False
    )
    parser.set_defaults(run=inspect, after_interrupt="nothing was changed")
    add = parser.add_argument
    add("prefix", type=prefix, metavar="PREFIX", help="path without .bin and .idx")
    add("--document", type=int, default=0, metavar="N", help="which one to show, from 0")
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.json of GPT-2's BPE")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt beside it")
    add("--tokenizer-model", type=Path, metavar="FILE", help="SentencePiece or tokenizer.json")
    parser = commands.add_parser(
        "merge", help="join .bin/.idx pairs", description=MERGE, allow_abbrev=False
    )
    parser.set_defaults(run=merge, after_interrupt="nothing was written")
    parser.add_argument("prefixes", nargs="+", type=prefix, metavar="PREFIX", help="two or more")
    parser.add_argument("--output-prefix", type=merged_prefix, required=True, metavar="P")
    parser = commands.add_parser(
        "find", help="print the prefix of prepared data", description=FIND, allow_abbrev=False
    )
    parser.set_defaults(run=find, after_interrupt="nothing was changed")
    parser.add_argument("name", choices=[EMBEDDED, OSCAR])
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="as for prepare")


def inspect(arguments: argparse.Namespace) -> int:
    """Run ``inspect``."""
    from dataset.inspection import inspect_prefix, is_shifted

    with alive("inspecting"):
        found = inspect_prefix(arguments.prefix, arguments.document, _tokenizer(arguments))
    say(f"prefix      {arguments.prefix}")
    say(f"documents   {found.documents:,}")
    say(
        f"tokens      {found.tokens:,} of {found.id_bytes} bytes, "
        f"longest sequence {found.longest:,}"
    )
    if found.manifest:
        say(f"vocabulary  {found.manifest.vocab_size:,}, end of document {found.manifest.eod}")
        if is_shifted(found.manifest):
            say("lengths     without end-of-document, as --megatron-deepspeed-compat asked for")
    else:
        say("manifest    none for this prefix: checksums, ids and text were not checked")
    if found.sample is not None:
        sample = visible(found.sample, kept="\n\t")
        say(f"document {arguments.document} begins:\n{sample}")
    for problem in found.problems:
        say(f"DAMAGED     {problem}")
    if found.problems:
        return FOUND_DAMAGE
    say("checks      all passed")
    return 0


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    from dataset.tokenizer.bpe import ByteLevelBpe
    from dataset.tokenizer.choose import load

    if arguments.tokenizer_model:
        return load(arguments.tokenizer_model)
    if not arguments.vocab_file and not arguments.merge_file:
        return None
    if not (arguments.vocab_file and arguments.merge_file):
        raise DatasetError("--vocab-file and --merge-file: give both")
    return ByteLevelBpe.from_gpt2_files(arguments.vocab_file, arguments.merge_file)


def merge(arguments: argparse.Namespace) -> int:
    """Run ``merge``."""
    from dataset.merging import merge as merge_pairs

    if len(arguments.prefixes) < 2:
        raise DatasetError("give two prefixes or more")
    with alive("merging"):
        counts = merge_pairs(arguments.prefixes, arguments.output_prefix)
    tell(f"{counts.documents:,} documents, {counts.tokens:,} tokens")
    say(str(arguments.output_prefix))
    return 0


def find(arguments: argparse.Namespace) -> int:
    """Run ``find``."""
    folder = cache.folder_to_use(arguments.cache_dir)
    if arguments.name == OSCAR:
        found = folder / OSCAR / f"{OSCAR}_text_document"
        # The manifest is written last: where it is, the pair is whole.
        is_there = manifest.path_of(found).is_file()
    else:
        from dataset.default.build import place
        from dataset.default.embedded import EmbeddedSource

        found, key = place(EmbeddedSource(), folder)
        is_there = cache.look_up(found.parent, key)[0] is not None
    if not is_there:
        return NOT_PREPARED
    say(str(found))
    return 0
