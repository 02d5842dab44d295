"""What the clock's module reads of the kernel."""

from pathlib import Path

from launch.trainer import clock


def test_reserved_memory_is_no_less_than_what_is_resident():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [resident] = [int(line.split()[1]) for line in status.splitlines() if "VmHWM:" in line]
    assert clock.reserved_peak_gib() >= resident / 2**20


def test_a_kernel_that_does_not_tell_ends_no_run(monkeypatch):
    """Some containers' kernels have no such line, and the figure is read when training is over."""
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_options: "Name:\tpython\n")
    assert clock.reserved_peak_gib() is None
