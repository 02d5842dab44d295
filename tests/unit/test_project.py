"""Rules about the project's own files."""

import re
import subprocess
import tomllib
from pathlib import Path

import deep_optimizer_states
from deep_optimizer_states.__main__ import REQUIRED

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


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_a_section_name_one_that_is_there():
    links = [
        (path, path.parent / name if name else path, anchor)
        for path in documents()
        for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text())
    ]
    assert len(links) > 20
    assert [
        f"{short(path)}: {page.name}#{anchor}"
        for path, page, anchor in links
        if anchor not in anchors(page)
    ] == []


DESIGN = (ROOT / "docs" / "design.md").read_text()


def test_the_files_that_the_design_names_exist():
    names = set(re.findall(r"`([\w/]+(?:/|\.(?:py|cpp|toml)))`", DESIGN))
    assert len(names) > 40
    roots = (ROOT, ROOT / "src" / "deep_optimizer_states")
    missing = {name for name in names if not any((root / name).exists() for root in roots)}
    assert missing == {"study.toml", "tables/"}  # of every study, of every sweep


def test_the_design_has_every_ordering_rule():
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", DESIGN, re.MULTILINE)
    source = ROOT / "src" / "deep_optimizer_states" / "core" / "device" / "base.py"
    rules = re.findall(r'^    ([A-Z_]+) = "(.*)"$', source.read_text(), re.MULTILINE)
    assert len(rules) > 10
    assert rows == rules


def test_only_the_two_packages_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in packages} == {"deep_optimizer_states", "optimus_cc"}
    found = {str(p.parent.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("__init__.py")}
    assert {name.replace("/", ".") for name in found} == set(packages)


def test_every_file_of_the_packages_is_packed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed, own = set(), {name.replace(".", "/") for name in settings["packages"]}
    for package in own:
        patterns = ["*.py", *settings["package-data"].get(package.replace("/", "."), ())]
        folder = ROOT / "src" / package
        packed |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {p for p in tracked("*") if p.is_relative_to(ROOT / "src") and p.suffix != ".md"}
    assert {short(path) for path in files - packed} == set()
    hook = ROOT / "src" / "deep_optimizer_states" / "site_hook" / "sitecustomize.py"
    assert hook in files  # in no package: a top-level module of this name is every Python's
    assert str(hook.parent.relative_to(ROOT / "src")) not in own


def test_what_the_index_shows_of_the_wheel_is_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", text)[0] for text in project["dependencies"]]
    assert tuple(dict.fromkeys(names)) == REQUIRED
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / project["readme"]).read_text())
    assert links
    assert all(link.startswith("https://") for link in links)  # it comes without the checkout


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


def test_a_release_is_called_alike_everywhere():
    version = deep_optimizer_states.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    releases = re.findall(r"^## (\d\S*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == version
