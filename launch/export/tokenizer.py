"""The tokenizer of the data that a run was trained on, as Hugging Face reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import read_json
from launch.pair import manifest_of
from launch.trainer.checkpoint import Checkpoint

END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE vocabulary in the format of `tokenizers`, or why there is none."""

    path: Path | None = None
    end_of_document: int | None = None
    """Its id; None where the vocabulary has none."""
    prefix: str = ""
    """Of the data that it was made for."""
    lacking: str = ""
    """Why there is none."""

    def config(self, max_length: int) -> dict[str, Any]:
        """What ``tokenizer_config.json`` says.

        Args:
            max_length: tokens of the model's longest text.
        """
        ends = () if self.end_of_document is None else ("bos_token", "eos_token")
        # The class that takes tokenizer.json as it is.
        name = "PreTrainedTokenizerFast"
        return {
            "tokenizer_class": name,
            "model_max_length": max_length,
            **dict.fromkeys(ends, END_OF_DOCUMENT),
        }


def tokenizer_of(checkpoint: Checkpoint, data_prefix: str | None) -> Tokenizer:
    """The tokenizer beside the run's data.

    Args:
        checkpoint: the run's.
        data_prefix: of the data, where they lie elsewhere than the run says.

    Raises:
        ConfigError: the data at the prefix are others than the run's, or their manifest cannot be
            read.
    """
    run_dir = checkpoint.run_dir
    prefix = data_prefix or (read_json(run_dir / "run.json").get("data_prefix") if run_dir else "")
    if not prefix:
        return Tokenizer(lacking="the checkpoint lies in no run's folder; give --data-prefix")
    manifest = manifest_of(prefix)
    if not manifest:
        return Tokenizer(lacking=f"the data {prefix} have no manifest that names one")
    known, facts = manifest.get("files") or {}, checkpoint.data or {}
    for end, trained_on in facts.items():
        if known.get(f"{Path(prefix).name}{end}", trained_on) != trained_on:
            raise ConfigError(
                f"{prefix}{end}: other data than the checkpoint {checkpoint.path} was trained on; "
                "give --data-prefix of its data"
            )
    path = Path(prefix).parent / str(manifest.get("tokenizer"))
    if path.suffix != ".json" or not path.is_file():
        return Tokenizer(lacking=f"{path} is no tokenizer.json")
    return Tokenizer(path, manifest["eod"] if manifest["eod"] >= 0 else None, prefix)
