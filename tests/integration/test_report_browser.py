"""The report in a real browser: no error, no request, sorting, both colour schemes, a small screen.

Chromium is steered through its own chromedriver, which speaks JSON over HTTP.
"""

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest
from processes import wait_for
from programs import report as main

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver on the PATH"
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "YPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
STEM = (
    "log-tiny-tp1-dp1-l2-h64-a4-sl64-gbs2-mbs{}-ratio1-subg1000000"
    "-prefetch{}-flush_async{}-opt_gaps{}"
)


class Chromium:
    """A browser that chromedriver steers."""

    def __init__(self, port, profile):
        self.base = f"http://127.0.0.1:{port}"
        wanted = {
            "goog:chromeOptions": {
                "binary": BROWSER, "args": [*OPTIONS, f"--user-data-dir={profile}"],
            },
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }  # fmt: skip
        started = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{started['sessionId']}"

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None

    def open(self, path):
        self._call("POST", "/url", {"url": path.as_uri()})

    def run(self, script, *arguments):
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, css):
        found = self._call("POST", "/elements", {"using": "css selector", "value": css})
        return [next(iter(element.values())) for element in found]

    def click(self, css):
        (element,) = self.find(css)
        self._call("POST", f"/element/{element}/click", {})

    def press(self, css, key):
        (element,) = self.find(css)
        self._call("POST", f"/element/{element}/value", {"text": key})

    def cdp(self, command, **parameters):
        body = {"cmd": command, "params": parameters}
        return self._call("POST", "/goog/cdp/execute", body)

    def log(self, kind):
        return self._call("POST", "/se/log", {"type": kind})

    def leave(self):
        self._call("DELETE", "")


@pytest.fixture
def chromium(tmp_path):
    with (tmp_path / "driver.log").open("w+") as log:
        process = subprocess.Popen([DRIVER, "--port=0"], stdout=log, stderr=subprocess.STDOUT)
        try:
            browser = Chromium(_port(tmp_path / "driver.log"), tmp_path / "profile")
            try:
                yield browser
            finally:
                browser.leave()
        finally:
            process.terminate()
            process.wait()


def _port(log):
    words = r"started successfully on port (\d+)"
    return int(wait_for(lambda: re.search(words, log.read_text()))[1])


@pytest.fixture
def report(tmp_path, capsys):
    """A sweep of 60 runs on small logs, some of them bad, with a figure of each kind."""
    folder = tmp_path / "a 'sweep' #1"
    runs = []
    for size in range(1, 21):
        for engine, knobs in (("vanilla", (0, 0, 0)), ("async-gradients", (0, 1, 0)),
                              ("hybrid", (1, 1, 2))):  # fmt: skip
            runs.append(_write_run(folder, engine, size, knobs))
    index = {"name": EVIL, "description": EVIL, "runs": runs, "figures": ["loss"]}
    (folder / "sweep.json").write_text(json.dumps(index))
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.png").write_bytes(base64.b64decode(PNG))
    main([str(folder)])
    capsys.readouterr()
    return folder / "report.html"


def _write_run(folder, engine, size, knobs):
    stem = STEM.format(size, *knobs)
    run = folder / stem / "run-001"
    run.mkdir(parents=True)
    failed = engine == "hybrid" and size % 5 == 0
    lines = [] if failed else [_line(i, 0.1 + 0.01 * ((7 * size) % 20)) for i in range(6)]
    (run / f"{stem}.log").write_text("".join(lines))
    status = {
        "status": "failed" if failed else "ok",
        "seconds": 2.5,
        "cause": EVIL if failed else "",
    }
    (run / "run.json").write_text(json.dumps({"log": f"{stem}.log"}))
    (run / "status.json").write_text(
        json.dumps(status | {"last_lines": ["</pre>" + EVIL] * failed})
    )
    return {"name": stem, "engine": engine, "log": f"{stem}.log", "run_dir": f"{stem}/run-001"}


def _line(index, seconds):
    return (
        f" elapsed_time {seconds:.6f} | consumed samples: {2 * index + 2} |"
        f" consumed tokens: {128 * index + 128} |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
        f" learning rate: 3.000E-04 | global batch size: 2 | lm loss: {9 - 0.1 * index:.6E} |"
        " loss scale: 1.0 | actual seqlen: 64 | number of skipped iterations: 0 |"
        " number of nan iterations: 0 | samples per second: 1.000 | TFLOPs: 2.50 |\n"
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


@pytest.mark.timeout(900)
def test_the_report_in_chromium(chromium, report):
    chromium.log("performance")
    chromium.cdp("Emulation.setEmulatedMedia", features=_scheme("light"))
    chromium.open(report)
    _nothing_is_asked_for_or_wrong(chromium)
    _tables_sort(chromium)
    _colours_follow_the_system_and_the_button(chromium)
    _a_small_screen_scrolls_tables_alone(chromium)
    assert [entry for entry in chromium.log("browser") if entry["level"] != "INFO"] == []


def _nothing_is_asked_for_or_wrong(chromium):
    assert chromium.run("return document.title") == EVIL
    assert chromium.run("return document.scripts.length") == 1
    sizes = "return Array.from(document.images, (i) => [i.complete, i.naturalWidth])"
    assert chromium.run(sizes) == [[True, 1]]
    events = [json.loads(entry["message"])["message"] for entry in chromium.log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
        and event["params"]["documentURL"].startswith("file:")  # not the browser's own first page
    ]
    named = [url for url in asked if not url.startswith("data:")]
    assert [url.rpartition("/")[2] for url in named] == ["report.html"]
    assert named[0].startswith("file:///")


def _tables_sort(chromium):
    names = chromium.run(COLUMN, 0)
    assert len(names) == 60
    in_order = sorted(names, key=lambda name: [int(t) if t.isdigit() else t for t in _parts(name)])
    chromium.click("#summary thead th:nth-child(1) button")
    assert chromium.run(COLUMN, 0) == in_order
    assert chromium.run(HEADINGS) == ["ascending", *[None] * 7]
    chromium.press("#summary thead th:nth-child(1) button", "\ue007")
    assert chromium.run(COLUMN, 0) == in_order[::-1]
    assert chromium.run(HEADINGS)[0] == "descending"
    for direction in (1, -1):
        chromium.click("#summary thead th:nth-child(2) button")
        times = chromium.run(COLUMN, 1)
        assert times[-4:] == ["missing"] * 4  # without a time, whichever way the rest is sorted
        numbers = [float(text.partition(" ")[0]) for text in times[:-4]]
        assert numbers == sorted(numbers, reverse=direction < 0)
    assert chromium.run(HEADINGS) == [None, "descending", *[None] * 6]


def _parts(name):
    return re.findall(r"\d+|\D+", name)


def _colours_follow_the_system_and_the_button(chromium):
    assert chromium.run(GROUND) == WHITE
    chromium.cdp("Emulation.setEmulatedMedia", features=_scheme("dark"))
    assert chromium.run(GROUND) == BLACK
    chromium.click("#theme")
    assert chromium.run(GROUND) == WHITE
    chromium.cdp("Emulation.setEmulatedMedia", features=_scheme("light"))
    chromium.click("#theme")
    assert chromium.run(GROUND) == BLACK
    label = "return document.getElementById('theme').getAttribute('aria-label')"
    assert chromium.run(label) == "Switch to light colours"


def _a_small_screen_scrolls_tables_alone(chromium):
    chromium.cdp(
        "Emulation.setDeviceMetricsOverride",
        width=380, height=800, deviceScaleFactor=1, mobile=True,
    )  # fmt: skip
    assert chromium.run("return document.documentElement.scrollWidth") <= 380
    wide = "(d) => d.scrollWidth > d.clientWidth"
    tables = f"return Array.from(document.querySelectorAll('.scroll'), {wide})"
    assert True in chromium.run(tables)


def _scheme(value):
    return [{"name": "prefers-color-scheme", "value": value}]
