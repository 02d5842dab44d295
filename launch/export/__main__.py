"""Write a run's model for Hugging Face: ``python -m launch.export RUN --out DIR``.

RUN is a run's folder (its last checkpoint is taken) or a checkpoint's own. DIR gets config.json,
model.safetensors, the tokenizer of the run's data, tasks made of its held-out documents, and
export.json, which says where it all comes from; it must not be there yet. The architecture is gpt2.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from configs.errors import ConfigError
from configs.files import write_json
from configs.schema import Model
from launch.cli import Parser, run_command, say
from launch.export.tokenizer import Tokenizer, tokenizer_of
from launch.trainer.checkpoint import Checkpoint, find_checkpoint

SCHEMA_VERSION = 1
"""Of ``export.json``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code 0.

    Raises:
        ConfigError: the user has to mend something.
    """
    options = _parser().read(sys.argv[1:] if argv is None else argv)
    out: Path = options.out
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out}: already there, and nothing is overwritten; give another")
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError("safetensors is not installed: pip install -r requirements/dev.txt")
    checkpoint = find_checkpoint(options.checkpoint)
    tokenizer = tokenizer_of(checkpoint, options.data_prefix)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that it gets its name by one rename.
    scratch = out.with_name(f".{out.name}-{os.getpid()}")
    scratch.mkdir()
    try:
        _write(checkpoint, tokenizer, scratch)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{out}: iteration {checkpoint.iteration} of {checkpoint.path}")
    if tokenizer.path is None:
        say(f"no tokenizer: {tokenizer.lacking}")
    return 0


def _parser() -> Parser:
    parser = Parser("python -m launch.export", __doc__ or "")
    parser.add_argument(
        "checkpoint", type=Path, metavar="RUN", help="a run's folder or a checkpoint's"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--data-prefix", metavar="PREFIX", help="of the run's data, if they lie elsewhere now"
    )
    return parser


def _write(checkpoint: Checkpoint, tokenizer: Tokenizer, folder: Path) -> None:
    # Only now: torch takes seconds to import.
    from huggingface_hub import save_torch_state_dict

    from launch.export.gpt2 import gpt2_config, gpt2_weights, require_gpt2
    from launch.export.held_out import write_tasks
    from launch.export.shards import merge

    try:
        model = Model.model_validate(checkpoint.point["model"])
    except (KeyError, ValidationError) as error:
        raise ConfigError(
            f"{checkpoint.path}: checkpoint.json describes no model: {error}"
        ) from None
    require_gpt2(model)
    weights = gpt2_weights(merge(checkpoint), model)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    save_torch_state_dict(weights, folder)
    write_json(folder / "config.json", gpt2_config(model, dtype, tokenizer.end_of_document))
    for path in folder.glob("*.safetensors"):
        # safetensors lets nobody but the user read them, whatever the umask is.
        path.chmod((folder / "config.json").stat().st_mode)
    if tokenizer.path is not None:
        shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
        write_json(folder / "tokenizer_config.json", tokenizer.config(model.seq_length))
        write_tasks(checkpoint, tokenizer.prefix, tokenizer.path, folder)
    write_json(
        folder / "export.json",
        {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": str(checkpoint.path),
            "iteration": checkpoint.iteration,
            "point": checkpoint.point,
            "data": checkpoint.data,
        },
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
