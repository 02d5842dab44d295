"""Rules about the project's own files."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 800


def short(path):
    return str(path.relative_to(ROOT))


def tracked(*patterns):
    """Files under version control, or every file of a source tree without it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name]
    return [
        path for pattern in patterns for path in ROOT.rglob(pattern) if ".venv" not in path.parts
    ]


def test_files_are_short():
    lines = {short(path): path.read_text().count("\n") for path in tracked("*.py", "*.cpp", "*.sh")}
    assert {name: number for name, number in lines.items() if number > LONGEST_FILE} == {}


def documents():
    """Every text; a golden report's figures lie beside the report it was copied from."""
    return [path for path in tracked("*.md") if "golden" not in path.parts]


def test_links_in_documents_lead_somewhere():
    links = [
        (path, target)
        for path in documents()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    ]
    assert len(links) > 50
    assert [f"{short(p)} links to {to}" for p, to in links if not (p.parent / to).exists()] == []


def test_only_the_two_packages_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in packages} == {"deep_optimizer_states", "optimus_cc"}
    found = {str(p.parent.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("__init__.py")}
    assert {name.replace("/", ".") for name in found} == set(packages)


def test_every_makefile_target_has_a_help_line():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    documented = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert targets - documented == set()


def test_every_requirement_is_pinned():
    pin = r'[a-z0-9-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?'
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(pin, line), line
