"""Judge an exported model by tasks of lm-eval: ``python -m launch.zero_shot DIR --tasks NAMES``.

DIR is what ``launch.export`` wrote. NAMES, with commas, are lm-eval's, or those of ``--include``.
lm-eval's table is printed, and all figures go into a JSON file. Without a network
(``HF_HUB_OFFLINE=1``) a task's data must lie in the hub's cache, or in files of your own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from configs.cli import Parser, count, run_command, say
from configs.errors import ConfigError
from configs.files import read_given_json, write_json

PUBLISHED = "lambada_openai,hellaswag,piqa,mathqa,winogrande,race"
"""What the paper's tables have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code 0.

    Raises:
        ConfigError: the user has to mend something.
    """
    parser = Parser("python -m launch.zero_shot", __doc__ or "")
    parser.add_argument("folder", type=Path, metavar="DIR", help="what launch.export wrote")
    parser.add_argument(
        "--tasks", default=PUBLISHED, metavar="NAMES", help=f"with commas [default {PUBLISHED}]"
    )
    parser.add_argument(
        "--include", type=Path, metavar="DIR", help="folder of YAML files with tasks of your own"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="[default DIR/zero-shot.json]")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="[default 8]")
    limit = "samples of each task, to try it out"
    parser.add_argument("--limit", type=count, metavar="N", help=limit)
    options = parser.read(argv)
    for name, remedy in (
        ("config.json", "make it with python -m launch.export"),
        ("tokenizer.json", "texts need it; export a run whose data have one"),
    ):
        if not (options.folder / name).is_file():
            raise ConfigError(f"{options.folder}: no {name}; {remedy}")
    out = options.out or options.folder / "zero-shot.json"
    if out.exists():
        raise ConfigError(f"--out {out}: already there, and nothing is overwritten")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm_eval is not installed: pip install -r requirements/dev.txt")
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    names, manager = options.tasks.split(","), TaskManager(include_path=options.include)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"--tasks {name}: neither lm-eval nor --include has it; "
                "`python -m lm_eval ls tasks` lists those of lm-eval"
            )
    try:
        found = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(options.folder)},
            tasks=names,
            num_fewshot=0,
            batch_size=options.batch_size,
            device="cuda" if torch.cuda.is_available() else "cpu",
            limit=options.limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (OSError, ValueError) as error:  # of a network, of a cache
        raise ConfigError(
            f"--tasks {options.tasks}: {str(error).splitlines()[0]}; run it where there is a "
            "network, or copy its cache (HF_HOME) from a machine that ran it"
        ) from None
    record = {
        "model": str(options.folder.resolve()),
        "export": read_given_json(options.folder / "export.json"),
        "limit": options.limit,
        **{key: found[key] for key in ("results", "n-samples", "versions", "lm_eval_version")},
    }
    write_json(out, record)
    say(f"{make_table(found)}\n{out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
