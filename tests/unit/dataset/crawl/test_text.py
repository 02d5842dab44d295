import sys
import types

import pytest

from dataset.crawl.text import decoded, extractor, visible_text
from dataset.errors import DatasetError


def test_what_a_reader_reads_is_left_with_a_line_for_each_block():
    page = """<html><head><title>no</title><style>p {}</style></head><body>
      <nav>menu <a>no</a></nav><h1>A  title</h1><p>One <b>bo</b>ld &amp; long
      line<br>two</p><script>if (a < b) "</p>"</script><form>no</form>
      <ul><li>three<li>four</ul><footer>no</footer></body></html>"""
    assert visible_text(page) == "A title\nOne bold & long line\ntwo\nthree\nfour"


def test_what_is_not_closed_hides_no_more_than_its_surroundings():
    assert visible_text("<head><title>no<body><p>yes") == "yes"
    assert visible_text("<div><nav>no<aside>no</nav>yes</div>") == "yes"
    assert visible_text("no tags at all") == "no tags at all"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("grüße".encode(), "text/html; charset=utf-8"),
        ("grüße".encode("latin-1"), 'text/html; charset="ISO-8859-1"'),
        (b'<meta charset="windows-1252">' + "grüße".encode("cp1252"), "text/html"),
        ("\ufeffgrüße".encode(), "text/html; charset=latin-1"),
        ("grüße".encode(), "text/html"),
        ("grüße".encode(), "text/html; charset=none-such"),
        ("grüße".encode(), "text/html; charset=ascii"),  # a lie
    ],
)
def test_the_charset_is_the_servers_the_pages_or_a_guess(body, content_type):
    assert decoded(body, content_type).removeprefix('<meta charset="windows-1252">') == "grüße"


def test_what_is_no_text_is_decoded_all_the_same():
    assert isinstance(decoded(bytes(range(256)) * 4, "text/html"), str)


def test_articles_need_a_library_and_say_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    missing = r"trafilatura \(.*\): pip install trafilatura==2.3.1 lxml_html_clean==0.4.6; --ext"
    with pytest.raises(DatasetError, match=missing):
        extractor("article")
    assert extractor("visible") is visible_text


def test_a_page_without_an_article_has_no_text(monkeypatch):
    stand_in = types.ModuleType("trafilatura")
    stand_in.extract = lambda page, include_comments: {"<p>a": "a"}.get(page)
    monkeypatch.setitem(sys.modules, "trafilatura", stand_in)
    assert [extractor("article")(page) for page in ("<p>a", "<p>")] == ["a", ""]
