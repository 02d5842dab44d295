"""Judge an exported model by tasks of lm-eval: ``python -m launch.zero_shot DIR --tasks NAMES``.

DIR is what ``launch.export`` wrote. NAMES, with commas, are lm-eval's, those of ``--include``, or
the export's own, held_out_perplexity and held_out_endings, which need no network. A table is
printed, and all figures go into a JSON file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.cli import Parser, complain, count, run_command, say
from configs.errors import ConfigError
from configs.files import read_given_json, write_json
from launch.export.held_out import task_config

SCHEMA_VERSION = 1
"""Of the JSON file."""
PUBLISHED = "lambada_openai,hellaswag,piqa,mathqa,winogrande,race"
"""What the paper's tables have."""
FOLDERS = {name: name.partition("_")[0] for name in PUBLISHED.split(",")}
"""Where lm-eval keeps them: to index its thousands of tasks takes a minute on some machines."""
HUB = "https://huggingface.co"
ANSWER_S = 5.0
"""Longest time until the hub answers."""
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code 0.

    Raises:
        ConfigError: the user has to mend something.
    """
    options = _read(sys.argv[1:] if argv is None else argv)
    if not _is_online():
        # Before anything of the hub is imported, which reads them then.
        os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    tasks = _load(options)
    import torch
    from lm_eval import simple_evaluate

    found: Any = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(options.folder)},
        tasks=tasks,
        num_fewshot=0,
        batch_size=options.batch_size,
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        limit=options.limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    record = {
        "schema_version": SCHEMA_VERSION,
        "model": str(options.folder.resolve()),
        "export": read_given_json(options.folder / "export.json"),
        "lm_eval": found.get("lm_eval_version"),
        "limit": options.limit,
        "num_samples": {name: n["effective"] for name, n in found["n-samples"].items()},
        "task_versions": {name: str(version) for name, version in found["versions"].items()},
        "results": {name: _figures(result) for name, result in found["results"].items()},
    }
    write_json(options.out, record)
    say(f"{table(record)}\n{options.out}")
    return 0


def _read(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m launch.zero_shot", __doc__ or "")
    parser.add_argument("folder", type=Path, metavar="DIR", help="what launch.export wrote")
    parser.add_argument(
        "--tasks", default=PUBLISHED, metavar="NAMES", help=f"with commas [default {PUBLISHED}]"
    )
    parser.add_argument(
        "--include", type=Path, metavar="DIR", help="folder of YAML files with tasks of your own"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="[default DIR/zero-shot-NNN.json]")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="[default 8]")
    parser.add_argument(
        "--limit", type=count, metavar="N", help="samples of each task, to try it out"
    )
    parser.add_argument("--device", metavar="NAME", help="[default: a GPU where there is one]")
    options = parser.read(argv)
    if not (options.folder / "config.json").is_file():
        raise ConfigError(f"{options.folder}: no config.json; make it with python -m launch.export")
    if not (options.folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{options.folder}: no tokenizer.json, which texts need; export with --data-prefix of "
            "data that have one"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm_eval is not installed: pip install -r requirements/dev.txt")
    if options.out is None:
        number = len(list(options.folder.glob("zero-shot-*.json"))) + 1
        options.out = options.folder / f"zero-shot-{number:03d}.json"
    if options.out.exists():
        raise ConfigError(f"--out {options.out}: already there, and nothing is overwritten")
    return options


def _is_online() -> bool:
    """Whether the hub answers: its own programs would try for minutes."""
    if any(os.environ.get(name, "0").upper() not in ("", "0", "FALSE") for name in _OFFLINE):
        return False
    try:
        request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or HUB, method="HEAD")
        urllib.request.urlopen(request, timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        complain("the hub does not answer: only what is local or in its cache can be evaluated")
        return False
    return True


def _load(options: argparse.Namespace) -> list[Any]:
    """Make the tasks, with their data, before the model is loaded.

    Raises:
        ConfigError: a task is not known, or its data cannot be had.
    """
    from lm_eval.tasks import TaskManager, __file__ as place

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    own = {name: task_config(name, options.folder) for name in names}
    others = [name for name, config in own.items() if config is None]
    short = [Path(place).parent / FOLDERS[name] for name in others if name in FOLDERS]
    include = [path for path in (*short, options.include) if path is not None]
    manager = TaskManager(include_path=include, include_defaults=False)
    if any(name not in manager.all_tasks for name in others):
        manager = TaskManager(include_path=include)
    unknown = [name for name in others if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--tasks {unknown[0]}: neither lm-eval nor the export nor --include has it; "
            "`python -m lm_eval ls tasks` lists those of lm-eval"
        )
    found, lacking = [], []
    for name, config in own.items():
        try:
            found += manager.load([config or name])["tasks"].values()
        except (OSError, ValueError) as error:  # of a network, of a cache, of a file
            entry = manager.task_index.get(name)
            data = (getattr(entry, "cfg", None) or {}).get("dataset_path", "its data")
            lacking.append(f"{name} needs {data} ({str(error).splitlines()[0]})")
    if lacking:
        raise ConfigError(
            f"{'; '.join(lacking)}: run it where there is a network, or copy its cache "
            "(HF_HOME) from a machine that ran it; the export's own tasks need neither"
        )
    return found


def _figures(result: dict[str, Any]) -> dict[str, float]:
    """Figures of a task by metric; lm-eval adds the name of a filter, and errors it left out."""
    return {
        name.partition(",")[0]: float(value)
        for name, value in result.items()
        if isinstance(value, int | float) and "_stderr" not in name
    }


def table(record: dict[str, Any]) -> str:
    """The results as lines of text: task, samples, metric, figure."""
    rows = [
        (task, str(record["num_samples"].get(task, "")), metric, f"{value:.6g}")
        for task, figures in record["results"].items()
        for metric, value in figures.items()
        if metric != "sample_len"
    ]
    rows = [("task", "samples", "metric", "figure"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
