"""The pages of docs/studies, and the commands on them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "studies").glob("*.md"))


def block_commands(text):
    """Return the lines of a page's shell blocks, comments behind them included."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for line in "".join(blocks).splitlines() if line and not line.startswith("#")]


def commands(text):
    """Return those, and the code in a page's text that begins like a command."""
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return block_commands(text) + re.findall(r"`((?:bash|python|make|nox) [^`\n]+)`", rest)
