import socket

import pytest
from hypothesis import given, strategies as st

from configs.errors import ConfigError
from launch.hosts.hostfile import Host, meeting_host, read_hostfile, same_slots, share_out

A, B, C = Host("a", 4), Host("b", 4), Host("c", 2)


def test_a_hostfile_is_deepspeeds(tmp_path):
    path = tmp_path / "host file"
    path.write_text("# nodes\nnode-1 slots=4\n\n  user@10.0.0.2\tslots=8  # the big one\n")
    assert read_hostfile(path) == (Host("node-1", 4), Host("user@10.0.0.2", 8))
    assert read_hostfile(path)[1].address == "10.0.0.2"


@pytest.mark.parametrize("text", ["node-1 slots=4\n", "# nodes\nnode-1 slots=4\n"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8-sig")
    assert read_hostfile(path) == (Host("node-1", 4),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node-1", ":1: 'node-1': write HOST slots=N"),
        ("a slots=2\nnode-1 slots=0", ":2: 'node-1 slots=0': write HOST slots=N"),
        ("a slots=2 extra", ":1: 'a slots=2 extra'"),
        ("a slots=2\na slots=3", ":2: host 'a' is there already"),
        ("-oProxyCommand=x slots=2", "'-oProxyCommand=x' is not the name"),
        ("a;reboot slots=2", "'a;reboot' is not the name"),
        ("$(id) slots=2", "is not the name"),
        ("# none\n", "names no host"),
    ],
)
def test_a_wrong_hostfile_is_refused_by_line(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_hostfile(tmp_path / "nowhere")


@given(st.text(min_size=1, max_size=12))
def test_no_host_is_a_word_of_a_shell_or_an_option(name):
    from launch.hosts.hostfile import check_host_name

    try:
        check_host_name(name, "here")
    except ConfigError:
        return
    assert name.isascii()
    assert not name.startswith("-")
    assert not set(name) & set(" \t\n'\"\\$`;&|<>()*?[]{}!~#=%^,/")


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        (4, None, [("a", 4)]),
        (6, None, [("a", 4), ("b", 2)]),
        (10, None, [("a", 4), ("b", 4), ("c", 2)]),
        (2, 2, [("a", 1), ("b", 1)]),
        (6, 3, [("a", 2), ("b", 2), ("c", 2)]),
    ],
)
def test_ranks_fill_hosts_in_order_or_equally(ranks, nodes, expected):
    hosts = share_out((A, B, C), ranks, nodes)
    assert [(host.name, host.slots) for host in hosts] == expected


@pytest.mark.parametrize(
    ("ranks", "nodes", "words"),
    [
        (11, None, "11 ranks, the hosts have 10 slots"),
        (4, 4, "--nnodes 4: there are 3 hosts"),
        (5, 2, "cannot be shared out equally"),
        (9, 3, "host 'c' would run 3 ranks and has 2"),
    ],
)
def test_too_few_hosts_are_refused(ranks, nodes, words):
    with pytest.raises(ConfigError, match=words):
        share_out((A, B, C), ranks, nodes)


def test_deepspeed_needs_equal_hosts():
    assert same_slots([A, B]) == 4
    with pytest.raises(ConfigError, match="not a 4, c 2; give --nnodes"):
        same_slots([A, C])


def test_the_first_host_is_where_ranks_meet_unless_it_is_a_loopback():
    assert meeting_host([Host("me@a", 1), B], None) == "a"
    assert meeting_host([A, B], "10.0.0.9") == "10.0.0.9"
    assert meeting_host([Host("localhost", 2)], None) == "localhost"
    with pytest.raises(ConfigError, match="the others cannot reach it"):
        meeting_host([Host("localhost", 1), B], None)
    with pytest.raises(ConfigError, match="--master-addr"):
        meeting_host([A], "-x")


def test_this_machine_needs_no_remote_shell():
    assert Host("localhost", 1).is_here
    assert Host(socket.gethostname(), 1).is_here
    assert not Host("elsewhere.example", 1).is_here
    assert not Host(f"other@{socket.gethostname()}", 1).is_here
