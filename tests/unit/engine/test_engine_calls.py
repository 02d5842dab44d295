import signal
from types import SimpleNamespace

import pytest
from engine_updates import start_thread

from deep_optimizer_states.adapter.hooks import signals_held_back
from deep_optimizer_states.adapter.own_stream import own_stream_alone, synchronize


def test_only_who_says_so_waits_for_its_own_stream_and_only_while_it_does():
    said = []
    stream = SimpleNamespace(synchronize=lambda: said.append("stream"))
    accelerator = SimpleNamespace(current_stream=lambda: stream)

    def wait():
        synchronize(lambda *given: said.append(given), accelerator, 3)

    with own_stream_alone():
        with own_stream_alone():
            wait()
        start_thread(wait)()
        accelerator.current_stream = lambda: None  # a CPU has none
        wait()
    with pytest.raises(ZeroDivisionError), own_stream_alone():
        1 / 0  # noqa: B018 - it is there to fail
    wait()
    assert said == ["stream", (accelerator, 3), (accelerator, 3)]


@pytest.mark.own_process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_handler_of_the_users_is_called_after_the_block(number):
    seen = []
    signal.signal(number, lambda number, frame: seen.append("handler"))
    with signals_held_back():
        signal.raise_signal(number)
        seen.append("block")
    assert seen == ["block", "handler"]


def test_other_threads_are_left_alone():
    seen = []

    def run():
        with signals_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    start_thread(run)()
    assert seen == [signal.getsignal(signal.SIGINT)]
