"""Two tasks for lm-eval of a run's own held-out documents, which need no network.

They lie in the exported folder as JSON lines: ``held_out_perplexity`` has texts of the length of
the model's context, ``held_out_endings`` their beginnings with four endings, of which the three
wrong ones go on other texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dataset import indexed
from launch.trainer.checkpoint import Checkpoint

PERPLEXITY, ENDINGS = "held_out_perplexity", "held_out_endings"
FOLDER = "tasks"
"""Of an exported folder; holds a file a task."""
MOST_TEXTS = 200
_NUM_ENDINGS = 4


def write_tasks(checkpoint: Checkpoint, prefix: str, tokenizer: Path, folder: Path) -> None:
    """Write the tasks' texts into the folder of an export; none where too few texts are held out.

    Args:
        checkpoint: whose point says which documents are held out.
        prefix: of the data that it was trained on.
        tokenizer: their ``tokenizer.json``.
        folder: of the export.
    """
    texts = _texts(checkpoint.point, prefix, tokenizer)
    if len(texts) < _NUM_ENDINGS:
        return
    (folder / FOLDER).mkdir()
    rows: dict[str, list[dict[str, Any]]] = {PERPLEXITY: [], ENDINGS: []}
    for number, (start, end) in enumerate(texts):
        rows[PERPLEXITY].append({"text": start + end})
        others = range(1, _NUM_ENDINGS)
        # Far from each other, so that they are of other documents where there are some.
        step = len(texts) // _NUM_ENDINGS
        endings = [texts[(number + step * other) % len(texts)][1] for other in others]
        label = number % _NUM_ENDINGS
        endings.insert(label, end)
        rows[ENDINGS].append({"text": start, "endings": endings, "label": label})
    for name, table in rows.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in table)
        (folder / FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def _texts(point: dict[str, Any], prefix: str, tokenizer: Path) -> list[tuple[str, str]]:
    """Beginning and end, an eighth, of pieces of the held-out documents."""
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer)).decode
    # One token of the context is taken by the end of the document before.
    length = point["model"]["seq_length"] - 1
    cut = length - length // 8
    found: list[tuple[str, str]] = []
    index = indexed.read(Path(prefix))
    for number in _held_out(point["split"], index.num_documents):
        tokens = index.document(number).tolist()
        for first in range(0, len(tokens) - length, length):
            piece = tokens[first : first + length]
            found.append((decode(piece[:cut]), decode(piece[cut:])))
            if len(found) == MOST_TEXTS:
                return found
    return found


def _held_out(split: str, count: int) -> range:
    """Documents of the second share, which megatron-core's data sets evaluate on."""
    shares = [float(share) for share in split.split(",")]
    bounds = [sum(shares[:end]) / (sum(shares) or 1.0) for end in (1, 2)]
    first, last = (round(count * bound) for bound in bounds)
    return range(first, last)


def task_config(name: str, folder: Path) -> dict[str, Any] | None:
    """A task as lm-eval takes it; None where the exported folder has none of that name.

    Args:
        name: of the task.
        folder: of the export.
    """
    path = folder / FOLDER / f"{name}.jsonl"
    if not path.is_file():
        return None
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
        "test_split": "test",
    }
    if name == PERPLEXITY:
        metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
        return {
            **common,
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": metric} for metric in metrics],
        }
    return {
        **common,
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "endings",
        # An ending goes on in the middle of its text: nothing stands between them.
        "target_delimiter": "",
        "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
    }
