"""The paper's corpus and GPT-2's vocabulary: put there by hand, or from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset.files import DatasetError, file_digest

HUB = "https://huggingface.co"
ENDPOINT_VARIABLE = "HF_ENDPOINT"


@dataclass(frozen=True)
class HubFile:
    """One file of a repository on the hub."""

    name: str
    """Its name when it is put there by hand, as in the artifact's commands."""
    repository: str
    path: str
    sha256: str | None
    """None where only the hub tells it."""

    def url(self, endpoint: str) -> str:
        """Return where a browser finds it."""
        return f"{endpoint}/{self.repository}/resolve/main/{self.path}"


OSCAR = HubFile("oscar-1GB.jsonl.xz", "bigscience/misc-test-data", "stas/oscar-1GB.jsonl.xz", None)
GPT2_VOCABULARY = HubFile(
    "gpt2-vocab.json",
    "openai-community/gpt2",
    "vocab.json",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
GPT2_MERGES = HubFile(
    "gpt2-merges.txt",
    "openai-community/gpt2",
    "merges.txt",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)


def hub_endpoint() -> str:
    """Return where the hub is: the environment's mirror, else the hub itself."""
    return (os.environ.get(ENDPOINT_VARIABLE) or HUB).rstrip("/")


def fetch(
    files: Sequence[HubFile],
    folder: Path,
    endpoint: str,
    cache: Path | None,
    say: Callable[[str], None],
) -> list[Path]:
    """Have all ``files``: those that lie in ``folder`` are checked, the others come from the hub.

    Args:
        files: What is needed.
        folder: Where files were put by hand.
        endpoint: As `hub_endpoint` gives it.
        cache: Where fetched files are kept; None for the hub's own cache (``$HF_HOME``).
        say: Gets one line for each file that is asked for.

    Raises:
        DatasetError: One cannot be had, or is not what it should be; the message says where to put
            the files by hand.
    """
    # Read when the package is imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    found = []
    for file in files:
        path = folder / file.name
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            say(f"fetching {file.url(endpoint)}")
            try:
                # All of it is public: a token would only be shown to whatever mirror is asked.
                path = Path(
                    hf_hub_download(
                        file.repository, file.path, endpoint=endpoint, cache_dir=cache, token=False
                    )
                )
            except Exception as error:  # the client lets its HTTP library's own errors through
                reason = str(error.__cause__ or error).partition("\n")[0]
                raise DatasetError(
                    f"cannot get {file.url(endpoint)} ({reason}).\n"
                    f"{_by_hand(files, folder, endpoint)}"
                ) from error
        if file.sha256 and (digest := file_digest(path)) != file.sha256:
            raise DatasetError(
                f"wrong SHA-256 {digest}, should be {file.sha256}; {path.resolve()}: delete it and "
                "run again"
            )
        found.append(path)
    return found


def oscar_text(folder: Path) -> Path | None:
    """Return the corpus if it was put into ``folder``, packed or unpacked."""
    for name in (OSCAR.name, OSCAR.name.removesuffix(".xz")):
        if (folder / name).is_file():
            return folder / name
    return None


def _by_hand(files: Sequence[HubFile], folder: Path, endpoint: str) -> str:
    lines = [f"Without a network, put these files into {folder} and run the same command again:"]
    for file in files:
        state = "there" if (folder / file.name).is_file() else f"from {file.url(endpoint)}"
        lines.append(f"  {file.name}  {state}")
    return "\n".join(lines)
