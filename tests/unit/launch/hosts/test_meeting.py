import json
import socket
import threading

import pytest
from processes import DEADLINE_S

from configs.errors import ConfigError
from configs.study import make_point
from launch.hosts.meeting import host_meeting, join_meeting
from launch.hosts.ranks import free_port
from launch.records.run_folder import study_of

POINT = make_point({"model": "tiny", "dp": 3, "global_batch_size": 6})
OTHER = make_point({"model": "tiny", "dp": 3, "global_batch_size": 12})


@pytest.fixture
def run_json(tmp_path):
    path = tmp_path / "it's\na run" / "run.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"point": POINT.model_dump(mode="json"), "study": study_of(POINT)}))
    return path


@pytest.fixture
def meeting(run_json):
    port, errors = free_port(), []

    def host():
        try:
            host_meeting(port, 3, run_json, DEADLINE_S)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=host)
    thread.start()
    yield port, thread, errors
    thread.join()


def test_every_node_learns_the_run_in_any_order(meeting, run_json):
    port, thread, errors = meeting
    for node in (2, 1):
        assert join_meeting("127.0.0.1", port, node, POINT, DEADLINE_S) == run_json
    thread.join()
    assert errors == []


def test_strangers_and_others_runs_take_no_place(meeting, run_json):
    port, thread, errors = meeting
    with pytest.raises(ConfigError, match="its point is another one"):
        join_meeting("127.0.0.1", port, 1, OTHER, DEADLINE_S)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    join_meeting("127.0.0.1", port, 1, POINT, DEADLINE_S)
    with pytest.raises(ConfigError, match="node 1 is here already"):
        join_meeting("127.0.0.1", port, 1, POINT, DEADLINE_S)
    join_meeting("127.0.0.1", port, 2, POINT, DEADLINE_S)
    thread.join()
    assert errors == []


def test_missing_nodes_are_named(run_json):
    with pytest.raises(ConfigError, match=r"have not come: \[1\]"):
        host_meeting(free_port(), 2, run_json, 0.2)


def test_a_missing_host_is_named():
    with pytest.raises(ConfigError, match="node 0 does not answer"):
        join_meeting("127.0.0.1", free_port(), 1, POINT, 0.2)


def test_a_run_that_lies_on_no_shared_disk_is_said(meeting, run_json):
    port, _, _ = meeting
    text = run_json.read_text()

    def join(node):
        return join_meeting("127.0.0.1", port, node, POINT, DEADLINE_S)

    # The host has read it already, as soon as it answers anyone.
    with pytest.raises(ConfigError, match="node 9"):
        join(9)
    run_json.unlink()
    with pytest.raises(ConfigError, match="a file system that all nodes share"):
        join(1)
    run_json.write_text(text)
    join(2)
