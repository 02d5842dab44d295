import signal

import pytest
from deepspeed.accelerator import get_accelerator
from engine_updates import start_thread

from deep_optimizer_states.adapter.hooks import signals_held_back
from deep_optimizer_states.adapter.own_stream import own_stream_alone


def test_the_whole_device_is_waited_for_again_afterwards(monkeypatch):
    accelerator = get_accelerator()
    before = dict(vars(accelerator))
    with own_stream_alone():
        accelerator.synchronize()  # a CPU has no stream
        assert vars(accelerator) != before
    with pytest.raises(ZeroDivisionError), own_stream_alone():
        1 / 0  # noqa: B018 - it is there to fail
    assert vars(accelerator) == before


@pytest.mark.own_process
def test_a_handler_of_the_users_is_called_after_the_block(monkeypatch):
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append("handler"))
    with signals_held_back():
        signal.raise_signal(signal.SIGTERM)
        seen.append("block")
    assert seen == ["block", "handler"]


def test_other_threads_are_left_alone():
    seen = []

    def run():
        with signals_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    start_thread(run)()
    assert seen == [signal.getsignal(signal.SIGINT)]
