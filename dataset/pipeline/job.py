"""What `prepare --input` is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dataset.files import content_key
from dataset.readers.blocks import Reading
from dataset.tokenizer.choose import Choice

# Raise it when the same text must give other parts or other files.
FORMAT_VERSION = 2

WORK_ENDING = ".parts"


@dataclass(frozen=True)
class Job:
    """Files in, pairs out."""

    reading: Reading
    output_prefix: Path  # absolute
    tokenizer: Choice
    append_eod: bool
    shifted_lengths: bool = False
    """Leave end-of-document out of the lengths, as Megatron-DeepSpeed's script does."""
    bad_lines: Literal["skip", "fail"] = "skip"
    workers: int = 1

    @property
    def work_folder(self) -> Path:
        """Where parts wait to be joined."""
        return self.output_prefix.with_name(self.output_prefix.name + WORK_ENDING)

    def prefix(self, key: str) -> Path:
        """Where the pair of a key goes, named as by Megatron."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_document")

    def settings(self) -> dict[str, Any]:
        """All that decides the bytes but the text, as plain JSON."""
        return {
            "json_keys": list(self.reading.keys),
            "sample_by": self.reading.sample_by,
            "tokenizer": self.tokenizer.identity(),
            "append_eod": self.append_eod,
            "megatron_deepspeed_compat": self.shifted_lengths,
        }

    def plan(self) -> dict[str, Any]:
        """What parts made by an earlier run must agree on to be of use to this one."""
        inputs = [
            [str(file.path), file.kind, file.size_bytes, file.modified_ns]
            for file in self.reading.files
        ]
        plan = {
            "format": FORMAT_VERSION,
            "input": inputs,
            "part_bytes": self.reading.block_bytes,
            **self.settings(),
        }
        loaded: dict[str, Any] = json.loads(json.dumps(plan))
        return loaded

    def key(self) -> str:
        """Digest of the plan, part sizes left out: they do not show in the files."""
        return content_key({**self.plan(), "part_bytes": None})
