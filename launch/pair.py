"""A pair of Megatron's files: what it holds, and whether it is whole."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import ConfigError

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type of a token, sequences, boundaries of documents."""
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_TOKENS_AT_ONCE = 1 << 24
BY_MANIFEST, BY_SIZES = "manifest", "sizes"


def manifest_of(prefix: str) -> dict[str, Any]:
    """What `dataset` wrote about a pair; empty when it did not make it.

    Raises:
        ConfigError: There is a manifest that cannot be read.
    """
    own, shared = Path(f"{prefix}.manifest.json"), Path(prefix).parent / "manifest.json"
    for path in (own, shared):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}): get it again, or move it away if it is not of "
                f"{prefix}"
            ) from None
        if isinstance(found, dict) and found.get("prefix") == Path(prefix).name:
            return found
    return {}


def token_type(prefix: str) -> np.dtype[Any] | None:
    """Type of a token in ``.bin``; None when the index is not Megatron's."""
    header = _header(prefix)
    return None if header is None else np.dtype(_TOKEN_TYPES[header[2]])


def _header(prefix: str) -> tuple[bytes, int, int, int, int] | None:
    with Path(f"{prefix}.idx").open("rb") as file:
        raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        return None
    magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(raw)
    is_known = magic == _MAGIC and version == 1 and code in _TOKEN_TYPES
    return (magic, version, code, num_sequences, num_boundaries) if is_known else None


def documents(prefix: str, chosen: range) -> Iterator[list[int]]:
    """Tokens of some documents, end-of-document tokens included; none where the index is another's.

    Args:
        prefix: Of the pair, whose sequences are whole documents, as text has them.
        chosen: Which ones, in order.
    """
    header, kind = _header(prefix), token_type(prefix)
    if header is None or kind is None:
        return
    num_sequences = header[3]
    lengths = np.fromfile(f"{prefix}.idx", "<i4", num_sequences, offset=_HEADER.size)
    offset = _HEADER.size + lengths.nbytes
    starts = np.fromfile(f"{prefix}.idx", "<i8", num_sequences, offset=offset)
    for index in chosen:
        yield np.fromfile(f"{prefix}.bin", kind, lengths[index], offset=starts[index]).tolist()


def num_documents(prefix: str) -> int:
    """How many there are; 0 when the index is not Megatron's."""
    header = _header(prefix)
    return 0 if header is None else header[3]


@functools.cache
def largest_token(prefix: str, kind: np.dtype[Any], _sha256: str) -> int:
    """The largest token, -1 when there is none; read once while the contents stay."""
    largest, at = -1, 0
    while len(tokens := np.fromfile(f"{prefix}.bin", kind, _TOKENS_AT_ONCE, offset=at)):
        largest, at = max(largest, int(tokens.max())), at + tokens.nbytes
    return largest


def require_whole(
    prefix: str, facts: Mapping[str, Mapping[str, Any]], manifest: Mapping[str, Any]
) -> str:
    """Refuse damaged data: it would train without a word, on other tokens or in other documents.

    Args:
        prefix: Of the pair.
        facts: As :func:`launch.records.identity.data_facts` gives them.
        manifest: As :func:`manifest_of` gives it.

    Returns:
        What the files were held against: `BY_MANIFEST` (size and SHA-256), `BY_SIZES` (where there
        is none: tokens against index), or nothing when the index is not Megatron's.

    Raises:
        ConfigError: A file is not what it should be.
    """
    known = manifest.get("files") or {}
    name = Path(prefix).name
    if all(f"{name}{end}" in known for end in facts):
        for end, found in facts.items():
            if found != (told := known[f"{name}{end}"]):
                raise ConfigError(f"{prefix}{end} is damaged: {_difference(found, told)}")
        return BY_MANIFEST
    if _header(prefix) is None:
        return ""
    _require_same_size(prefix, facts[".idx"]["bytes"], facts[".bin"]["bytes"])
    return BY_SIZES


def _difference(found: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    advice = "; get it again, or move the pair away and prepare it again"
    if found["bytes"] != told["bytes"]:
        return f"it has {found['bytes']:,} bytes, its manifest says {told['bytes']:,}{advice}"
    return f"its SHA-256 is {found['sha256']}, its manifest says {told['sha256']}{advice}"


def _require_same_size(prefix: str, idx_bytes: int, bin_bytes: int) -> None:
    header = _header(prefix)
    assert header is not None
    num_sequences, num_boundaries = header[3:]
    size = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    # An index of several kinds of contents has another byte for each sequence.
    if idx_bytes not in (size, size + num_sequences):
        raise ConfigError(
            f"{prefix}.idx is damaged: it has {idx_bytes:,} bytes, its header says {size:,}; get "
            "it again"
        )
    lengths = np.fromfile(f"{prefix}.idx", "<i4", num_sequences, offset=_HEADER.size)
    num_indexed = int(lengths.sum(dtype=np.int64))
    num_there, rest = divmod(bin_bytes, np.dtype(_TOKEN_TYPES[header[2]]).itemsize)
    # Megatron-DeepSpeed's script does not count the token that ends each document.
    if rest or not num_indexed <= num_there <= num_indexed + num_boundaries - 1:
        raise ConfigError(
            f"{prefix}.bin holds {num_there:,} tokens{f' and {rest} bytes' if rest else ''}, "
            f"{prefix}.idx counts {num_indexed:,}: one of them is cut off, or they are of "
            "different pairs; get both again"
        )
