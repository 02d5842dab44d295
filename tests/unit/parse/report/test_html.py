"""The page as text, without a browser; tests/integration/test_report_browser.py has one."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from programs import report as main

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>'\n\u202e\x00&lt;"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg"><title>x</title>'
    "<dc:description>Bars &amp; lines. simulated</dc:description></svg>"
)


class Page(HTMLParser):
    """Elements of a page, and the text of each kind."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts[self._open[-1] if self._open else ""] = (
            self.texts.get(self._open[-1] if self._open else "", "") + data
        )

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def addresses(self):
        names = ("src", "href", "action", "srcset", "data", "poster", "formaction", "ping")
        return [a[name] for _, a in self.elements for name in names if name in a]


@pytest.fixture
def page(capsys):
    def make(folder):
        assert main([str(folder)]) in (0, 1)
        capsys.readouterr()
        return Page((folder / "report.html").read_text())

    return make


@pytest.fixture
def hostile_sweep(sweep_writer):
    """A sweep of which every word comes from somebody who means no good."""
    point = {"name": EVIL, "model": {"name": EVIL, "layers": 2}}
    bad = {"status": "failed", "cause": EVIL, "last_lines": [EVIL, "</pre><script>1</script>"]}
    runs = [("stock", 0, {"point": point}), ("stride", 2, {"point": point, **bad})]
    runs += [("all-host", 0, {"point": point, "provenance": {"platform": EVIL}})]
    points = [{"name": EVIL, "engine": EVIL, "repeats": 3}]
    folder = sweep_writer.write_runs(
        runs, points=points, name=EVIL, description=EVIL, figures=[EVIL]
    )
    index = json.loads((folder / "sweep.json").read_text())
    evil_folder = folder / "javascript:alert(1)" / "a\"'<b>&#x27;?q#f %41\n"
    evil_folder.parent.mkdir()
    (folder / index["runs"][0]["run_dir"]).rename(evil_folder)
    index["runs"][0]["run_dir"] = evil_folder.relative_to(folder).as_posix()
    (folder / "sweep.json").write_text(json.dumps(index))
    (folder / "figures").mkdir()
    (folder / "figures" / "a\"'<b>&.png").write_bytes(PNG)
    (folder / "figures" / "b.png").write_bytes(PNG)
    (folder / "figures" / "b.svg").write_text(SVG)
    return folder


def test_the_page_asks_nobody_for_anything(hostile_sweep, page):
    found = page(hostile_sweep)
    assert {tag for tag, _ in found.elements}.isdisjoint({"link", "iframe", "object", "base"})
    for address in found.addresses():
        assert address.startswith(
            ("data:image/png;base64,", "data:image/svg+xml;base64,", "#", "./")
        )
    style = (hostile_sweep / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [a["content"] for a in found.all("meta") if "http-equiv" in a]
    assert policy.startswith("default-src 'none'; img-src data:; ")
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.texts[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_what_logs_and_names_say_is_text(hostile_sweep, page):
    found = page(hostile_sweep)
    assert len(found.all("script")) == 1
    assert all(a["src"].startswith("data:") for a in found.all("img"))
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    text = (hostile_sweep / "report.html").read_text()
    assert "<script>alert" not in text
    assert "onerror=alert(1)>" not in text
    assert "\u202e" not in text
    assert "\x00" not in text
    shown = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>'"
    for tag in ("title", "h1", "th", "pre", "summary", "p", "td"):
        assert shown in found.texts[tag], tag


def test_links_lead_to_the_logs_and_nowhere_else(hostile_sweep, page):
    links = [a["href"] for a in page(hostile_sweep).all("a")]
    logs = [link for link in links if link.endswith(".log")]
    assert any("javascript%3Aalert" in link for link in logs)
    for link in links:
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc, parts.query) == ("", "", "")
        if parts.path:
            assert (hostile_sweep / unquote(parts.path)).is_file(), link


@pytest.mark.parametrize("where", ["../outside", "{absolute}"])
def test_a_log_outside_the_sweep_is_not_linked(sweep_writer, tmp_path, page, where):
    folder = sweep_writer.write()
    index = json.loads((folder / "sweep.json").read_text())
    (folder / index["runs"][0]["run_dir"]).rename(tmp_path / "outside")
    index["runs"][0]["run_dir"] = where.format(absolute=tmp_path / "outside")
    (folder / "sweep.json").write_text(json.dumps(index))
    found = page(folder)
    links = [a["href"] for a in found.all("a")]
    assert len([link for link in links if link.endswith(".log")]) == 2
    assert not [link for link in links if "outside" in link]
    assert "no log" in found.texts["td"]


def test_tables_are_ready_for_the_script_that_sorts_them(sweep_writer, page):
    found = page(sweep_writer.write())
    tables = found.all("table")
    assert len(tables) >= 5
    assert all(a.get("class") == "sortable" for a in tables)
    text = (sweep_writer.folder / "report.html").read_text()
    for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
        assert len({len(re.findall(r"<t[hd][ >]", row)) for row in rows}) == 1, table
    assert {"measured on a CPU"} <= set(re.findall(r'class="tag">([^<]*)<', text))


def test_figures_stand_in_the_page_in_the_order_asked_for(sweep_writer, page):
    figures = ["stride", "memory", "loss"]
    folder = sweep_writer.write_runs([("stock", 0, {})], figures=figures)
    (folder / "figures").mkdir()
    names = ("aaa.png", "loss.svg", "stride.png", "loss.png", "loss.pdf", "only.svg", ".x.png")
    for name in (*names, "t.txt"):
        (folder / "figures" / name).write_bytes(SVG.encode() if name.endswith("svg") else PNG)
    found = page(folder)
    kinds = [a["src"].split(";")[0].removeprefix("data:image/") for a in found.all("img")]
    assert kinds == ["png", "svg+xml", "png"], "the vector where there is one"
    stride, loss = (
        "Update throughput and iteration time against the stride",
        "Loss of every iteration",
    )
    alts = [a["alt"].partition(",")[0] for a in found.all("img")]
    assert alts == [stride, "Bars & lines. simulated", "aaa"]
    captions = (folder / "report.html").read_text().split("<figcaption>")[1:]
    assert [caption.startswith(name) for caption, name in zip(
        captions, (stride, loss, "aaa "), strict=True
    )] == [True] * 3  # fmt: skip
    assert "measured on a CPU" in captions[0]
    assert '<span class="tag">simulated</span>' in captions[1]
    assert "./figures/loss.pdf" in found.addresses()
    assert "Asked for and not drawn: memory." in found.texts["p"]


def test_a_report_names_the_command_that_made_it_and_the_fields_that_it_set(sweep_writer, page):
    words = ["--engines", "stock", "--subgroup-numel", "<2 & 3"]
    asked = {"options": words, "fields": {"subgroup_numel": "<2 & 3"}}
    folder = sweep_writer.write_runs([("stock", 0, {})], name="basic", asked=asked)
    command = "bash master-script.sh --sweep basic --engines stock --subgroup-numel '<2 & 3'"
    found = page(folder)
    assert command in found.texts["code"]
    assert "Set by its command" in found.texts["p"]
    markdown = (folder / "report.md").read_text()
    assert f"Made by `{command}`; " in markdown
    assert "in every run that takes it: subgroup-numel \\<2 \\& 3." in markdown.split("## ")[0]
    index = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps({**index, "asked": None}))
    page(folder)
    markdown = (folder / "report.md").read_text()
    assert "Made by `bash master-script.sh --sweep basic`; " in markdown
    assert "Set by its command" not in markdown


def test_a_figures_numbers_and_command_stand_behind_it(sweep_writer, page):
    folder = sweep_writer.write_runs([("stock", 0, {})], figures=["loss"])
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.png").write_bytes(PNG)
    table = "panel,name,what,value\n<b>,7B & stock,forward (ms),20\nbroken\n"
    (folder / "figures" / "loss.csv").write_text(table)
    page(folder)
    text = (folder / "report.html").read_text().partition("<details><summary>Numbers")[2]
    text = text.partition("</details>")[0]
    assert "python -m plots SWEEP_DIR/tables --out SWEEP_DIR/figures --figure loss" in text
    assert '<th scope="row">7B &amp; stock</th><td>&lt;b&gt;</td><td>forward (ms)</td>' in text
    assert "broken" not in text


@pytest.mark.parametrize(("device", "name", "count"), [("cpu", "basic", 2), ("cpu", "stride", 0),
                                                       ("Test GPU", "basic", 0)])  # fmt: skip
def test_without_a_gpu_the_default_report_shows_the_studys_figure_as_predicted(
    device, name, count, sweep_writer, page
):
    sweep_writer.device = device
    folder = sweep_writer.write_runs([("stock", 0, {})], name=name)
    own = folder.parent / "simulated-mine" / "models" / "figures"
    own.mkdir(parents=True)
    (own / "models.svg").write_text(SVG)
    images = page(folder).all("img")
    assert len(images) == count
    if count:
        text = (folder / "report.html").read_text().partition('id="predicted"')[2]
        text = text.partition("</section>")[0]
        both = text.count('<span class="tag">simulated and published</span>')
        assert both == 2, "of the figure, and of its numbers"
        assert text.count('<span class="tag">simulated</span>') == 1
        assert "machine mine" in text
        assert ">measured" not in text
        assert "--simulate --machine mine --sweep models" in text
