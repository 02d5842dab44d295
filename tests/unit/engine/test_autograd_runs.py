"""Whoever begins a run of autograd is heard, and what comes out of it."""

import os

import pytest
import torch
from torch.autograd import Variable

from deep_optimizer_states.adapter.autograd_runs import listen, stop_listening


class Listener:
    def __init__(self):
        self.heard = []

    def before_autograd(self):
        self.heard.append("begins")
        return len(self.heard)

    def after_failed_autograd(self, before):
        self.heard.append(f"failed, {before}")


@pytest.fixture
def listener():
    found = Listener()
    listen(found)
    yield found
    stop_listening(found)


@pytest.fixture
def loss():
    return torch.ones(3, requires_grad=True).square().sum()


def fail(_gradient):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "run",
    [
        torch.Tensor.backward,
        torch.autograd.backward,
        lambda loss: torch.autograd.grad(loss, loss),
        lambda _loss: torch.func.grad(torch.sum)(torch.ones(3)),
    ],
    ids=["backward", "autograd.backward", "autograd.grad", "func.grad"],
)
def test_every_run_is_heard(listener, loss, run):
    run(loss)
    assert listener.heard == ["begins"]


def test_an_error_is_heard_by_those_that_heard_the_beginning(listener, loss):
    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert listener.heard == ["begins", "failed, 1"]


def test_what_a_listener_raises_begins_no_run(listener, loss, monkeypatch):
    monkeypatch.setattr(listener, "before_autograd", lambda: 1 / 0)
    seen = []
    loss.register_hook(seen.append)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert (seen, listener.heard) == ([], [])


def test_torch_has_its_own_object_back_after_the_last_listener(loss):
    own, both = Variable._execution_engine, [Listener(), Listener()]
    for one in both:
        listen(one)
    stop_listening(both[0])
    assert Variable._execution_engine is not own
    stop_listening(both[1])
    assert Variable._execution_engine is own
    loss.backward()
    assert both[0].heard == both[1].heard == []


def test_a_child_of_fork_waits_for_nobody(listener, loss):
    child = os.fork()
    if not child:
        code = 1
        try:
            loss.backward()
            code = len(listener.heard)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
