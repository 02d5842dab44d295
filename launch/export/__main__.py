"""Write a run's model for Hugging Face: ``python -m launch.export RUN --out DIR``.

RUN is a run's folder (its last checkpoint is taken) or a checkpoint's own. DIR gets config.json,
model.safetensors, the tokenizer of the run's data, and export.json, which says where it all comes
from; it must not be there yet. The architecture is gpt2.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from configs.cli import Parser, run_command, say
from configs.errors import ConfigError
from configs.files import read_json, write_json
from configs.schema import Model
from dataset import manifest
from launch.train_loop.checkpoint import Checkpoint, find_checkpoint

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
    options = parser.read(argv)
    out: Path = options.out
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out}: already there, and nothing is overwritten; give another")
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError("safetensors is not installed: make setup-tests")
    checkpoint = find_checkpoint(options.checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that it gets its name by one rename.
    scratch = out.with_name(f".{out.name}-{os.getpid()}")
    scratch.mkdir()
    try:
        has_tokenizer = _write(checkpoint, scratch)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{out}: iteration {checkpoint.iteration} of {checkpoint.path}")
    if not has_tokenizer:
        say("no tokenizer.json: the run's data have none, or are no longer where they were")
    return 0


def _write(checkpoint: Checkpoint, folder: Path) -> bool:
    # Only now: torch takes seconds to import.
    from huggingface_hub import save_torch_state_dict

    from launch.export.weights import gpt2_config, gpt2_weights, merge, require_gpt2

    model = Model.model_validate(checkpoint.point["model"])
    require_gpt2(model)
    tokenizer, end_of_document = _tokenizer_of(checkpoint)
    weights = gpt2_weights(merge(checkpoint), model)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    save_torch_state_dict(weights, folder)
    write_json(folder / "config.json", gpt2_config(model, dtype, end_of_document))
    for path in folder.glob("*.safetensors"):
        # safetensors lets nobody but the user read them, whatever the umask is.
        path.chmod((folder / "config.json").stat().st_mode)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        ends = () if end_of_document is None else ("bos_token", "eos_token")
        config = {
            # The class that takes tokenizer.json as it is.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.seq_length,
            **dict.fromkeys(ends, END_OF_DOCUMENT),
        }
        write_json(folder / "tokenizer_config.json", config)
    facts = {key: getattr(checkpoint, key) for key in ("iteration", "point", "data")}
    write_json(folder / "export.json", {"checkpoint": str(checkpoint.path), **facts})
    return tokenizer is not None


def _tokenizer_of(checkpoint: Checkpoint) -> tuple[Path | None, int | None]:
    """Find the tokenizer beside the run's data, and the id that ends a document."""
    run = {} if checkpoint.run_dir is None else read_json(checkpoint.run_dir / "run.json")
    prefix = Path(run.get("data_prefix") or checkpoint.path)
    told = manifest.raw(prefix)
    path = prefix.parent / str(told.get("tokenizer"))
    if path.suffix != ".json" or not path.is_file():
        return None, None
    return path, told["eod"] if told["eod"] >= 0 else None


if __name__ == "__main__":
    raise SystemExit(run_command(main))
