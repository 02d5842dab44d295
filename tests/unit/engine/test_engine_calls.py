import signal
import threading
from types import SimpleNamespace

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.timer import ThroughputTimer

from deep_optimizer_states.adapter.hooks import signals_held_back
from deep_optimizer_states.adapter.own_stream import own_stream_alone, time_own_stream


@pytest.fixture
def waits(monkeypatch):
    """What DeepSpeed waited for: the whole device, or one stream."""
    found, accelerator = [], get_accelerator()
    stream = SimpleNamespace(synchronize=lambda: found.append("stream"))
    monkeypatch.setattr(accelerator, "synchronize", lambda *_args: found.append("device"))
    monkeypatch.setattr(accelerator, "current_stream", lambda *_args: stream)
    return found


def run_timer(timer, steps=5):
    for _ in range(steps):
        timer.start()
        timer.stop(global_step=True, report_speed=False)


def test_the_throughput_timer_waits_for_the_callers_stream_alone(waits):
    run_timer(ThroughputTimer(DeepSpeedThroughputTimerConfig(), batch_size=1))
    assert waits.count("device") == 6, "DeepSpeed no longer synchronises: this code is needless"
    waits.clear()
    timer = ThroughputTimer(DeepSpeedThroughputTimerConfig(), batch_size=1)
    time_own_stream(timer)
    run_timer(timer)
    assert waits == ["stream"] * 6
    get_accelerator().synchronize()
    assert waits[-1] == "device"


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

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
