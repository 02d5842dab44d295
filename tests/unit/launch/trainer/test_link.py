"""What is told of the bytes that the kernel counts; ranks behind real links are another test's."""

from types import SimpleNamespace

import pytest
import torch

from configs.errors import ConfigError
from configs.study import load_study
from launch.hosts.namespaces import INTERFACE
from launch.trainer import link

STUDY = load_study("optimus-cc")


def link_bytes(mbit):
    return link.LinkBytes(STUDY.make_point({"model": "tiny", "link_mbit": mbit}))


@pytest.fixture
def sent(monkeypatch):
    """Bytes sent by now, by interface; three ranks have sent as many as this one."""
    sent = {INTERFACE: 5000, "lo": 1}

    def counters(**_options):
        return {name: SimpleNamespace(bytes_sent=number) for name, number in sent.items()}

    monkeypatch.setattr(link.psutil, "net_io_counters", counters)
    monkeypatch.setattr(link.dist, "all_reduce", lambda total: total.mul_(3))
    return sent


def test_every_iteration_of_every_rank_counts_and_nothing_between_them(sent):
    counted = link_bytes(mbit=20)
    for mib in (1, 2):
        counted.begin()
        sent[INTERFACE] += mib * 2**20
        counted.end()
        sent[INTERFACE] += 777  # an evaluation
    assert counted.results(torch.device("cpu")) == {"kernel_sent_mib": 9.0}


def test_of_links_as_they_are_nothing_is_told(sent):
    counted = link_bytes(mbit=0)
    counted.begin()
    sent[INTERFACE] += 2**20
    counted.end()
    assert counted.results(torch.device("cpu")) == {}


def test_a_rank_behind_no_link_is_told_how_to_be(sent):
    del sent[INTERFACE]
    with pytest.raises(ConfigError, match="link_mbit = 20: this rank is behind no link"):
        link_bytes(mbit=20).begin()
