"""Times are given, so that nothing waits."""

import pytest

from dataset.crawl import hosts as module
from dataset.crawl.hosts import Hosts, Task
from dataset.crawl.pages import Answer, _seconds

ALL = Answer(status=404, reason="HTTP 404")


def hosts_with(*urls, delay_s=1.0, at_once=1):
    hosts = Hosts("me/1.0 (+mailto:me@example.org)", delay_s, at_once)
    for number, url in enumerate(urls):
        hosts.add(Task(number, url, url))
    return hosts


def open_at(hosts, now_s, answer=ALL):
    """Take a host's rules and have them answered."""
    turn = hosts.take(now_s)
    assert turn.task is None
    hosts.set_rules(turn.host, answer)
    hosts.release(turn.host)
    return turn.host


def rules(*lines):
    return Answer(body="\n".join(lines).encode(), status=200)


def test_rules_come_first_and_nothing_else_meanwhile():
    hosts = hosts_with("http://a.example/1", "http://a.example/2", at_once=5)
    turn = hosts.take(0.0)
    assert (turn.host.robots_url, turn.task) == ("http://a.example/robots.txt", None)
    assert hosts.take(100.0) is None
    assert hosts.next_s() is None


def test_a_host_is_asked_once_in_its_time_and_others_meanwhile():
    hosts = hosts_with("http://a.example/1", "http://a.example/2", "http://b.example/3")
    first = open_at(hosts, 0.0)
    open_at(hosts, 0.0)
    assert hosts.take(0.9) is None
    assert hosts.next_s() == 1.0
    turns = [hosts.take(1.0), hosts.take(1.0)]
    assert [turn.task.number for turn in turns] == [0, 2]
    assert hosts.take(5.0) is None  # one at a time: the second page waits for the first
    hosts.release(first)
    assert hosts.take(1.9) is None
    assert hosts.take(2.0).task.number == 1


def test_more_than_one_at_a_time_is_a_choice():
    hosts = hosts_with("http://a.example/1", "http://a.example/2", delay_s=0.0, at_once=2)
    open_at(hosts, 0.0)
    assert [hosts.take(0.0).task.number, hosts.take(0.0).task.number] == [0, 1]


def test_a_host_may_ask_for_more_time_in_its_rules():
    hosts = hosts_with("http://a.example/1", "http://a.example/2")
    host = open_at(hosts, 0.0, rules("User-agent: *", "Crawl-delay: 7"))
    assert hosts.next_s() == 7.0
    assert hosts.take(7.0).task.number == 0
    hosts.release(host)
    assert hosts.next_s() == 14.0


def test_a_host_that_asks_to_be_left_alone_is():
    hosts = hosts_with("http://a.example/1", "http://a.example/2", at_once=2)
    host = open_at(hosts, 0.0)
    hosts.take(1.0)  # the next address is listed for 2.0 already
    hosts.release(host, free_s=60.0)
    assert hosts.take(59.0) is None
    assert hosts.take(60.0).task.number == 1


def test_what_the_rules_forbid_is_refused_and_costs_no_time():
    hosts = hosts_with("http://a.example/x/1", "http://a.example/x/2", "http://a.example/y")
    open_at(hosts, 0.0, rules("User-agent: ME", "Disallow: /x", "User-agent: *", "Disallow: /y"))
    turns = [hosts.take(1.0) for _ in range(3)]
    assert [turn.refusal for turn in turns] == ["robots.txt", "robots.txt", ""]


@pytest.mark.parametrize(("status", "is_open"), [(404, True), (410, True), (401, False)])
def test_lacking_rules_allow_all_unless_a_login_is_asked_for(status, is_open):
    hosts = hosts_with("http://a.example/1")
    open_at(hosts, 0.0, Answer(f"HTTP {status}", status=status))
    assert (hosts.take(1.0).refusal == "") is is_open


def test_a_closed_host_gives_the_reason_for_all_that_waits():
    hosts = hosts_with("http://a.example/1", "http://a.example/2")
    turn = hosts.take(0.0)
    turn.host.closed = "robots.txt: timeout"
    hosts.release(turn.host)
    assert [hosts.take(1.0).refusal for _ in range(2)] == ["robots.txt: timeout"] * 2
    assert hosts.num_waiting == 0


def test_hosts_that_nothing_is_asked_of_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MOST_KNOWN", 2)
    hosts = hosts_with("http://a.example/1", "http://b.example/1")
    open_at(hosts, 0.0)
    open_at(hosts, 0.0)
    done = hosts.take(1.0)
    hosts.release(done.host)
    hosts.add(Task(2, "http://c.example/", "http://c.example/"))
    assert sorted(hosts._hosts) == ["b.example", "c.example"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("120", 120.0), ("", 0.0), ("soon", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("-5", 0.0)],
)
def test_retry_after_is_seconds_or_a_date(text, expected):
    assert _seconds(text) == expected


def test_a_date_to_come_is_waited_for():
    assert _seconds("Fri, 31 Dec 2999 23:59:59 GMT") > 1e6
