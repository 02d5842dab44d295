"""Limits of processes that do not depend on how long Python takes to start."""

import subprocess

import pytest
from processes import wait_for


@pytest.fixture
def limits_begin_when(monkeypatch):
    """``limits_begin_when(first, second)`` makes the first wait for a process begin with ``first``.

    Its second one begins with ``second``, and so on. A process that has ended is not waited for.
    """

    def install(*conditions):
        class Patient(subprocess.Popen):
            num_waits = 0

            def wait(self, timeout=None):
                if self.num_waits < len(conditions):
                    condition = conditions[self.num_waits]
                    self.num_waits += 1
                    wait_for(lambda: self.poll() is not None or condition())
                return super().wait(timeout)

        monkeypatch.setattr(subprocess, "Popen", Patient)

    return install
