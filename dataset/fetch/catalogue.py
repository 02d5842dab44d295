"""The corpus of the paper's artifact, and where its three files come from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dataset.errors import DatasetError

BASE_URL = "https://huggingface.co"
# The hub's own variable, so that a mirror that is set up for other tools serves here too.
ENVIRONMENT_VARIABLE = "HF_ENDPOINT"


@dataclass(frozen=True)
class RemoteFile:
    """One file to have."""

    name: str
    """In the folder here, as the artifact's commands call it."""
    path: str
    """Below the base URL."""
    sha256: str | None
    """None where only the server tells it."""


OSCAR = RemoteFile(
    "oscar-1GB.jsonl.xz", "bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz", None
)
GPT2_VOCABULARY = RemoteFile(
    "gpt2-vocab.json",
    "openai-community/gpt2/resolve/main/vocab.json",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
GPT2_MERGES = RemoteFile(
    "gpt2-merges.txt",
    "openai-community/gpt2/resolve/main/merges.txt",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)


def base_url(given: str | None) -> str:
    """Where files come from: the URL given, else the environment's, else the hub itself.

    Raises:
        DatasetError: It is no http or https URL.
    """
    in_environment = os.environ.get(ENVIRONMENT_VARIABLE)
    url = given or in_environment or BASE_URL
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # brackets that are no address
        is_web = False
    if not is_web:
        name = "--base-url" if given else f"${ENVIRONMENT_VARIABLE}"
        raise DatasetError(f"{name} {url}: give a URL such as {BASE_URL}")
    return url.rstrip("/")


def oscar_text(folder: Path) -> Path | None:
    """The corpus if it lies in ``folder``, packed or unpacked."""
    for name in (OSCAR.name, OSCAR.name.removesuffix(".xz")):
        if (folder / name).is_file():
            return folder / name
    return None
