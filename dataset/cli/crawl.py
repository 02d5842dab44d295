"""``urls``, ``download`` and ``shuffle``: from lists of addresses to texts, and their order."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dataset.cli.common import count, megabytes, positive, say, seconds, tell, tell_counts
from dataset.errors import DatasetError

URLS = """\
Writes the addresses that may lead to text, one a line, each once, in the order in which they come;
the counts of every reason to drop one go beside them.
"""
DOWNLOAD = """\
Asks for pages, heeding robots.txt, one request a second to a host, and writes their texts as JSON
lines with 'id', 'url' and 'text', in the list's order. What became of an address is written down
at once: a run that was stopped goes on with the same command.
"""
SHUFFLE = """\
Writes the lines of files in an order that the seed decides. They need not fit into memory.
"""


def add(commands: Any) -> None:  # noqa: ANN401
    """Add the commands to a parser."""
    parser = commands.add_parser(
        "urls", help="sift lists of addresses", description=URLS, allow_abbrev=False
    )
    parser.set_defaults(run=urls, after_interrupt="nothing was written")
    _add_list(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="F.txt[.gz|.xz|.zst]")
    add("--blacklist", type=Path, metavar="F.toml",
        help="lists 'domains' and 'extensions' in place of those of dataset/crawl/blacklist.toml",
    )  # fmt: skip
    _add_download(commands)
    parser = commands.add_parser(
        "shuffle", help="put lines in a random order", description=SHUFFLE, allow_abbrev=False
    )
    parser.set_defaults(run=shuffle, after_interrupt="nothing was written")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, or .txt by lines")
    add("--output", type=Path, required=True, metavar="FILE", help="packed by its ending")
    add("--seed", type=count, required=True, metavar="N", help="decides the order")
    add("--memory-mb", type=megabytes, default=1 << 30, metavar="MIB",
        help="about what may be held at once; does not change the order (1024)")  # fmt: skip


def _add_list(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE",
        help=".txt with an address a line, or .jsonl or .parquet (packed or not)")  # fmt: skip
    add("--json-key", default="url", metavar="KEY", help="which field holds it (url)")


def _add_download(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "download", help="texts of the pages of a list", description=DOWNLOAD, allow_abbrev=False
    )
    kept = "what became of addresses so far is kept: the same command goes on"
    parser.set_defaults(run=download, after_interrupt=kept)
    _add_list(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="F.jsonl[.gz|.xz|.zst]")
    add("--user-agent", required=True, metavar="NAME",
        help="who asks, such as 'name/1.0 (+mailto:you@example.org)'; robots.txt goes by it",
    )  # fmt: skip
    add("--extract", choices=["article", "visible"], default="article",
        help="article: without menus and adverts (trafilatura); visible: nearly all of the page "
        "(no library)")  # fmt: skip
    add("--restart", action="store_true", help="drop unfinished work")
    add = parser.add_argument_group("manners and limits").add_argument
    add("--host-delay", type=seconds, default=1.0, metavar="S",
        help="between two requests to a host; its robots.txt may ask for more (1)")  # fmt: skip
    add("--host-at-once", type=positive, default=1, metavar="N", help="requests to a host (1)")
    add("--at-once", type=positive, default=32, metavar="N", help="requests to all hosts (32)")
    add("--timeout", type=positive, default=30, metavar="S",
        help="for the connection, each wait and a whole page (30)")  # fmt: skip
    add("--max-page-mb", type=megabytes, default=10 << 20, metavar="MIB", help="unpacked (10)")
    add("--attempts", type=positive, default=3, metavar="N",
        help="at a page, when the server or the network fails (3)")  # fmt: skip
    add("--longest-wait", type=seconds, default=600.0, metavar="S",
        help="give a host up whose Retry-After asks for more (600)")  # fmt: skip


def urls(arguments: argparse.Namespace) -> int:
    """Run ``urls``."""
    from dataset.crawl.urls import BLACKLIST, sift

    output = arguments.output.absolute()
    tell_counts(sift(_reading(arguments), arguments.blacklist or BLACKLIST, output), output)
    say(str(output))
    return 0


def download(arguments: argparse.Namespace) -> int:
    """Run ``download``."""
    from dataset.crawl.run import DownloadSettings, download as download_pages

    agent = arguments.user_agent.strip()
    if not agent.isascii() or not agent.isprintable() or not agent.partition("/")[0]:
        raise DatasetError(
            f"--user-agent {arguments.user_agent!r}: give a name such as "
            "'name/1.0 (+mailto:you@example.org)'"
        )
    settings = DownloadSettings(
        agent,
        arguments.extract,
        arguments.host_delay,
        arguments.host_at_once,
        arguments.at_once,
        arguments.timeout,
        arguments.max_page_mb,
        arguments.attempts,
        arguments.longest_wait,
    )
    output = arguments.output.absolute()
    counts = download_pages(_reading(arguments), settings, output, tell, arguments.restart)
    tell_counts(counts, output)
    say(str(output))
    return 0


def shuffle(arguments: argparse.Namespace) -> int:
    """Run ``shuffle``."""
    from dataset.readers import inputs
    from dataset.shuffling import shuffle as shuffle_lines

    output = arguments.output.absolute()
    files = inputs.find(arguments.input)
    num_lines = shuffle_lines(files, output, arguments.seed, arguments.memory_mb)
    tell(f"{num_lines:,} lines")
    say(str(output))
    return 0


def _reading(arguments: argparse.Namespace) -> Any:  # noqa: ANN401
    from dataset.readers import inputs
    from dataset.readers.blocks import Reading

    return Reading(inputs.find(arguments.input), (arguments.json_key,), "line")
