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
from dataclasses import dataclass
from pathlib import Path

from configs.cli import Parser, run_command, say
from configs.errors import ConfigError
from configs.files import read_json, write_json
from configs.schema import Model
from dataset import manifest
from launch.trainer.checkpoint import Checkpoint, find_checkpoint

SCHEMA_VERSION = 1
"""Of ``export.json``."""
END_OF_DOCUMENT = "<|endoftext|>"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code 0.

    Raises:
        ConfigError: the user has to mend something.
    """
    parser = Parser("python -m launch.export", __doc__ or "")
    parser.add_argument(
        "checkpoint", type=Path, metavar="RUN", help="a run's folder or a checkpoint's"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--data-prefix", metavar="PREFIX", help="of the run's data, if they lie elsewhere now"
    )
    options = parser.read(sys.argv[1:] if argv is None else argv)
    out: Path = options.out
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out}: already there, and nothing is overwritten; give another")
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError("safetensors is not installed: pip install -r requirements/dev.txt")
    checkpoint = find_checkpoint(options.checkpoint)
    tokenizer = _tokenizer_of(checkpoint, options.data_prefix)
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


@dataclass(frozen=True)
class _Tokenizer:
    """A byte-level BPE vocabulary in the format of `tokenizers`, or why there is none."""

    path: Path | None = None
    end_of_document: int | None = None
    """Its id; None where the vocabulary has none."""
    prefix: str = ""
    """Of the data that it was made for."""
    lacking: str = ""
    """Why there is none."""


def _tokenizer_of(checkpoint: Checkpoint, data_prefix: str | None) -> _Tokenizer:
    """Find the tokenizer beside the run's data, which may lie elsewhere than the run says."""
    run_dir = checkpoint.run_dir
    prefix = data_prefix or (read_json(run_dir / "run.json").get("data_prefix") if run_dir else "")
    if not prefix:
        return _Tokenizer(lacking="the checkpoint lies in no run's folder; give --data-prefix")
    told = manifest.raw(Path(prefix))
    if not told:
        return _Tokenizer(lacking=f"the data {prefix} have no manifest that names one")
    known, facts = told.get("files") or {}, checkpoint.data or {}
    for end, trained_on in facts.items():
        if known.get(f"{Path(prefix).name}{end}", trained_on) != trained_on:
            raise ConfigError(
                f"{prefix}{end}: other data than the checkpoint {checkpoint.path} was trained on; "
                "give --data-prefix of its data"
            )
    path = Path(prefix).parent / str(told.get("tokenizer"))
    if path.suffix != ".json" or not path.is_file():
        return _Tokenizer(lacking=f"{path} is no tokenizer.json")
    return _Tokenizer(path, told["eod"] if told["eod"] >= 0 else None, prefix)


def _write(checkpoint: Checkpoint, tokenizer: _Tokenizer, folder: Path) -> None:
    # Only now: torch takes seconds to import.
    from huggingface_hub import save_torch_state_dict

    from launch.export.held_out import write_tasks
    from launch.export.weights import gpt2_config, gpt2_weights, merge, require_gpt2

    model = Model.model_validate(checkpoint.point["model"])
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
        ends = () if tokenizer.end_of_document is None else ("bos_token", "eos_token")
        config = {
            # The class that takes tokenizer.json as it is.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.seq_length,
            **dict.fromkeys(ends, END_OF_DOCUMENT),
        }
        write_json(folder / "tokenizer_config.json", config)
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
    raise SystemExit(run_command(main))
