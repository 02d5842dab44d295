"""Runs rungs for real, until one does not run out of memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.study import default_study
from ds_config.command import CommandError
from ds_config.ladder import Rung

OUT_OF_MEMORY = re.compile(
    "out of memory|OutOfMemoryError|can't allocate memory|std::bad_alloc|MemoryError|oom-host"
    "|oom-device",
    re.IGNORECASE,
)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How a process ends that the kernel kills when host memory runs out."""
TRAINER_ITERATIONS = 3
GRACE_S = 10


class Attempts:
    """Runs of a user's command, or of this project's trainer.

    Args:
        command: With ``{config}``, and perhaps ``{checkpointing}`` (``true`` or ``false``); empty
            for the trainer.
        model: The trainer's model.
        limit_s: Seconds after which a run is ended and taken to fit.

    Raises:
        CommandError: the command has no place for the configuration.
    """

    def __init__(self, command: str, model: str, limit_s: int) -> None:
        if command and "{config}" not in command:
            raise CommandError("--try: the command has no {config}; say where the file's path goes")
        self._command, self._model, self._limit_s = command, model, limit_s

    def climb(
        self, rungs: list[Rung], start: int | None, order: str
    ) -> tuple[int | None, list[dict[str, str]]]:
        """Run rungs in an order.

        Args:
            rungs: From fastest to leanest.
            start: The first predicted to fit; from there ``fastest`` goes on to leaner ones.
            order: ``leanest`` begins with the last, and goes up from the first that runs while they
                do; ``bisect`` halves.

        Returns:
            The fastest that ran, None when none did; and how each run ended.

        Raises:
            CommandError: a run failed for another reason; gives its last line.
        """
        tried: list[dict[str, str]] = []
        ran: list[int] = []
        for idx in _order(len(rungs), start, order, ran):
            ended = self._run(rungs[idx])
            tried.append({"name": rungs[idx].name, "ended": ended})
            sys.stderr.write(f"tried {rungs[idx].name}: {ended}\n")
            if ended.startswith("ran"):
                ran.append(idx)
        return min(ran, default=None), tried

    def _run(self, rung: Rung) -> str:
        """Return how a run ended: ``ran``, or where its memory ran out."""
        with tempfile.TemporaryDirectory() as name:
            config, log_path = Path(name) / "ds_config.json", Path(name) / "log"
            config.write_text(json.dumps(rung.config, indent=2), encoding="utf-8")
            try:
                status = self._status(self._words(rung, config), log_path)
            except OSError as error:
                raise CommandError(f"--try: cannot be started: {error}") from None
            log = log_path.read_text(encoding="utf-8", errors="replace")
        if status is None:
            return f"ran for {self._limit_s} s"
        if status == 0:
            return "ran"
        if status in KILLED:
            return "out of host memory (killed, -9)"
        if found := OUT_OF_MEMORY.search(log):
            return f"out of memory ({found.group()})"
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
        raise CommandError(f"--try: rung '{rung.name}' ended with status {status}: {last[-300:]}")

    def _status(self, words: list[str], log_path: Path) -> int | None:
        """Run a command; None where it lasted too long and was ended."""
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)

    def _words(self, rung: Rung, config: Path) -> list[str]:
        on = "true" if rung.checkpointing else "false"
        if self._command:
            return [
                word.replace("{config}", str(config)).replace("{checkpointing}", on)
                for word in shlex.split(self._command)
            ]
        zero, table = rung.config["zero_optimization"], rung.config
        micro_batch = table["train_micro_batch_size_per_gpu"]
        batch_a_rank = micro_batch * table["gradient_accumulation_steps"]
        dtype = next((name for name in ("bf16", "fp16") if name in table), "fp32")
        fields = {
            "model": self._model,
            "engine": _engine_of(table),
            "dp": table["train_batch_size"] // batch_a_rank,
            "dtype": dtype,
            "zero-stage": zero["stage"],
            "iterations": TRAINER_ITERATIONS,
            "micro-batch-size": micro_batch,
            "global-batch-size": table["train_batch_size"],
            "activation-checkpointing": on,
            "offload-optimizer": zero.get("offload_optimizer", {}).get("device", "none"),
            "offload-param": zero.get("offload_param", {}).get("device", "none"),
        }
        flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        # No field of a run says the sizes, nor the types of the states.
        blocks = {name: table[name] for name in (dtype, "zero_optimization") if name in table}
        if rung.is_narrow:
            blocks["optimizer"] = {"params": {"fp32_optimizer_states": False}}
        rest = config.with_name("rest.json")
        rest.write_text(json.dumps(blocks), encoding="utf-8")
        # Without --share it would wait for other runs of this machine, and its time go by.
        more = ["--deepspeed-config", str(rest), "--no-memory-check", "--share"]
        return [sys.executable, "-m", "launch.run", "tiny", *flags, *more]


def _order(num_rungs: int, start: int | None, order: str, ran: list[int]) -> Iterator[int]:
    """Yield the next rung to run, by which of those before it ran."""
    if order == "bisect":
        low, high = 0, num_rungs
        while low < high:
            middle = (low + high) // 2
            yield middle
            low, high = (low, middle) if middle in ran else (middle + 1, high)
    elif order == "fastest":
        for idx in range(num_rungs - 1 if start is None else start, num_rungs):
            yield idx
            if ran:
                return
    else:
        for idx in reversed(range(num_rungs)):
            yield idx
            if ran and idx not in ran:
                return


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that a run that was started is ended with this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _engine_of(config: dict[str, Any]) -> str:
    """Return the engine of the default study that updates as a configuration says."""
    study = default_study()
    policy = config.get("deep_optimizer_states", {}).get("policy")
    for name, row in study.engines.items():
        if policy and row.ds_config.get("deep_optimizer_states", {}).get("policy") == policy:
            return name
    return study.reference


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run with the processes of its group: a launcher's ranks are among them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
