"""The report in a real browser: sorting, both colour schemes, a small screen, no error.

Chromium is steered through its own chromedriver, which speaks JSON over HTTP.
"""

import json
import re
import shutil
import subprocess
import urllib.request

import pytest
from processes import wait_for
from programs import report as main

from configs.published import study_folder
from configs.study import default_study

STUDY = default_study()
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
DRIVER = shutil.which("chromedriver")
needs_a_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver on the PATH"
)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
STEM = (
    "log-tiny-tp1-dp1-l2-h64-a4-sl64-gbs2-mbs{}-ratio1-subg1000000-prefetch0-flush_async0-opt_gaps0"
)
LINE = (
    " elapsed_time {0:.6f} | consumed samples: {1} | elapsed time per iteration (ms): {2:.1f} |"
    " learning rate: 3.000E-04 | global batch size: 2 | lm loss: 8.000000E+00 | loss scale: 1.0 |\n"
)
COLUMN = """
const column = arguments[0];
const rows = document.querySelector('#summary tbody').rows;
return Array.from(rows, (row) => row.cells[column].textContent.trim());
"""
HEADINGS = """
return Array.from(document.querySelectorAll('#summary thead th'),
                  (heading) => heading.getAttribute('aria-sort'));
"""
GROUND = "return getComputedStyle(document.body).backgroundColor"
WHITE, BLACK = "rgb(255, 255, 255)", "rgb(20, 24, 28)"


class Chromium:
    """A browser that chromedriver steers."""

    def __init__(self, port, profile):
        self.base = f"http://127.0.0.1:{port}"
        options = {"binary": BROWSER, "args": [*OPTIONS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        started = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{started['sessionId']}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request) as answer:
            return json.load(answer)["value"]

    def run(self, script, *arguments):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, css):
        found = self.call("POST", "/elements", {"using": "css selector", "value": css})
        (element,) = (next(iter(one.values())) for one in found)
        self.call("POST", f"/element/{element}/click", {})

    def cdp(self, command, **parameters):
        self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def prefer(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.cdp("Emulation.setEmulatedMedia", features=[feature])


@pytest.fixture
def chromium(tmp_path):
    path = tmp_path / "driver.log"
    with path.open("w+") as log:
        process = subprocess.Popen([DRIVER, "--port=0"], stdout=log, stderr=subprocess.STDOUT)
        try:
            words = r"started successfully on port (\d+)"
            port = int(wait_for(lambda: re.search(words, path.read_text()))[1])
            browser = Chromium(port, tmp_path / "profile")
            yield browser
            browser.call("DELETE", "")
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def report(tmp_path, capsys):
    """A sweep of twenty runs on small logs, four of which failed."""
    folder = tmp_path / "a 'sweep' #1"
    runs = []
    for size in range(1, 21):
        stem, failed = STEM.format(size), size % 5 == 0
        run = folder / stem / "run-001"
        run.mkdir(parents=True)
        seconds = 0.1 + 0.01 * ((7 * size) % 20)
        lines = [LINE.format(seconds, 2 * i + 2, 1000 * seconds) for i in range(6)]
        (run / f"{stem}.log").write_text("" if failed else "".join(lines))
        (run / "run.json").write_text(json.dumps({"log": f"{stem}.log"}))
        status = {"status": "failed" if failed else "ok", "seconds": 2.5, "cause": ""}
        (run / "status.json").write_text(json.dumps(status))
        entry = {"name": stem, "engine": "stock", "log": f"{stem}.log"}
        runs.append({**entry, "run_dir": f"{stem}/run-001"})
    index = {"name": "s", "description": "d", "runs": runs, "figures": []}
    (folder / "sweep.json").write_text(json.dumps(index))
    main([str(folder)])
    capsys.readouterr()
    return folder / "report.html"


OVERLAPS = """
const texts = Array.from(document.querySelectorAll("text"));
const boxes = texts.map((text) => [text, text.getBoundingClientRect()])
  .filter(([text]) => text.textContent.trim() && !text.closest('#watermark'));
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
return boxes.flatMap(([one, a], at) => boxes.slice(at + 1)
  .filter(([, b]) => overlap(a, b)).map(([two]) => [one.textContent, two.textContent]));
"""


@needs_a_browser
@pytest.mark.timeout(900)
def test_no_label_of_the_shipped_figure_lies_over_another(chromium):
    chromium.call("POST", "/url", {"url": (study_folder(STUDY) / "predicted.svg").as_uri()})
    assert chromium.run(OVERLAPS) == []


@needs_a_browser
@pytest.mark.timeout(900)
def test_the_report_in_chromium(chromium, report):
    chromium.prefer("light")
    chromium.call("POST", "/url", {"url": report.as_uri()})
    _tables_sort(chromium)
    _colours_follow_the_system_and_the_button(chromium)
    _a_small_screen_scrolls_tables_alone(chromium)
    entries = chromium.call("POST", "/se/log", {"type": "browser"})
    assert [entry for entry in entries if entry["level"] != "INFO"] == []


def _tables_sort(chromium):
    names = chromium.run(COLUMN, 0)
    assert len(names) == 20
    in_order = sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    chromium.click("#summary thead th:nth-child(1) button")
    assert chromium.run(COLUMN, 0) == in_order
    assert chromium.run(HEADINGS)[0] == "ascending"
    chromium.click("#summary thead th:nth-child(1) button")
    assert chromium.run(COLUMN, 0) == in_order[::-1]
    assert chromium.run(HEADINGS)[0] == "descending"
    for direction in (1, -1):
        chromium.click("#summary thead th:nth-child(2) button")
        times = chromium.run(COLUMN, 1)
        assert times[-4:] == ["missing"] * 4  # without a time, whichever way the rest is sorted
        numbers = [float(text.partition(" ")[0]) for text in times[:-4]]
        assert numbers == sorted(numbers, reverse=direction < 0)
    assert chromium.run(HEADINGS)[:2] == [None, "descending"]


def _colours_follow_the_system_and_the_button(chromium):
    assert chromium.run(GROUND) == WHITE
    chromium.prefer("dark")
    assert chromium.run(GROUND) == BLACK
    chromium.click("#theme")
    assert chromium.run(GROUND) == WHITE
    chromium.prefer("light")
    chromium.click("#theme")
    assert chromium.run(GROUND) == BLACK
    label = "return document.getElementById('theme').getAttribute('aria-label')"
    assert chromium.run(label) == "Switch to light colours"


def _a_small_screen_scrolls_tables_alone(chromium):
    size = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    chromium.cdp("Emulation.setDeviceMetricsOverride", **size)
    assert chromium.run("return document.documentElement.scrollWidth") <= 380
    wide = "(d) => d.scrollWidth > d.clientWidth"
    assert True in chromium.run(f"return Array.from(document.querySelectorAll('.scroll'), {wide})")
