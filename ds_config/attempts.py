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
from ds_config.ladder import Rung, Task, is_narrow

OUT_OF_MEMORY = re.compile(
    "out of memory|OutOfMemoryError|can't allocate memory|std::bad_alloc|MemoryError|oom-host"
    "|oom-device",
    re.IGNORECASE,
)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How a process ends that the kernel kills when host memory runs out."""
TRAINER_ITERATIONS = 3
GRACE_S = 10


class UnrunnableError(ValueError):
    """The command cannot be run, or ends for another reason than memory."""


class Attempts:
    """Runs of a user's command, or of this project's trainer.

    Args:
        command: With ``{config}``, and perhaps ``{checkpointing}`` (``true`` or ``false``); empty
            for the trainer.
        model: The trainer's model.
        task: What is trained.
        limit_s: Seconds after which a run is ended and taken to fit.

    Raises:
        UnrunnableError: the command has no place for the configuration.
    """

    def __init__(self, command: str, model: str, task: Task, limit_s: int) -> None:
        if command and "{config}" not in command:
            raise UnrunnableError(
                "--try: the command has no {config}; say where the file's path goes"
            )
        self._command, self._model, self._task, self._limit_s = command, model, task, limit_s

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
            UnrunnableError: a run failed for another reason; gives its last line.
        """
        tried: list[dict[str, str]] = []
        found = None
        for idx in self._order(rungs, start, order, tried):
            ended = self._run(rungs[idx])
            tried.append({"name": rungs[idx].name, "ended": ended})
            sys.stderr.write(f"tried {rungs[idx].name}: {ended}\n")
            if _ran(ended):
                found = idx if found is None else min(found, idx)
        return found, tried

    def _order(
        self, rungs: list[Rung], start: int | None, order: str, tried: list[dict[str, str]]
    ) -> Iterator[int]:
        """The next rung to run, by how those before it ended."""
        if order == "bisect":
            low, high = 0, len(rungs)
            while low < high:
                middle = (low + high) // 2
                yield middle
                low, high = (low, middle) if _ran(tried[-1]["ended"]) else (middle + 1, high)
            return
        fast = order == "fastest"
        first = start if start is not None else len(rungs) - 1
        for idx in range(first, len(rungs)) if fast else reversed(range(len(rungs))):
            yield idx
            is_over = any(_ran(item["ended"]) for item in tried)
            if is_over and _ran(tried[-1]["ended"]) is fast:
                return

    def _run(self, rung: Rung) -> str:
        """How a run ended: ``ran``, or where its memory ran out."""
        with tempfile.TemporaryDirectory() as name:
            config, log_path = Path(name) / "ds_config.json", Path(name) / "log"
            config.write_text(json.dumps(rung.config, indent=2), encoding="utf-8")
            try:
                status = self._started(self._words(rung, config), log_path)
            except OSError as error:
                raise UnrunnableError(f"--try: cannot be started: {error}") from None
            if status is None:
                return f"ran for {self._limit_s} s"
            log = log_path.read_text(encoding="utf-8", errors="replace")
        if status == 0:
            return "ran"
        if status in KILLED:
            return "out of host memory (killed, -9)"
        if found := OUT_OF_MEMORY.search(log):
            return f"out of memory ({found.group()})"
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
        raise UnrunnableError(
            f"--try: rung '{rung.name}' ended with status {status}: {last[-300:]}"
        )

    def _started(self, words: list[str], log_path: Path) -> int | None:
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
        batches = [table["train_micro_batch_size_per_gpu"], table["gradient_accumulation_steps"]]
        dtype = next((n for n in ("bf16", "fp16") if n in table), "fp32")
        ranks = table["train_batch_size"] // (batches[0] * batches[1])
        fields = {
            "model": self._model, "engine": _engine_of(table), "dp": ranks, "dtype": dtype,
            "zero-stage": zero["stage"], "iterations": TRAINER_ITERATIONS,
            "micro-batch-size": batches[0], "global-batch-size": table["train_batch_size"],
            "activation-checkpointing": on,
            "offload-optimizer": zero.get("offload_optimizer", {}).get("device", "none"),
            "offload-param": zero.get("offload_param", {}).get("device", "none"),
        }  # fmt: skip
        flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        # What no field of a run says: sizes, and types of the states.
        blocks = {name: table[name] for name in (dtype, "zero_optimization") if name in table}
        if is_narrow(table):
            blocks["optimizer"] = {"params": {"fp32_optimizer_states": False}}
        rest = config.with_name("rest.json")
        rest.write_text(json.dumps(blocks), encoding="utf-8")
        # Without --share it would wait for other runs of this machine, and its time go by.
        more = ["--deepspeed-config", str(rest), "--no-memory-check", "--share"]
        return [sys.executable, "-m", "launch.run", "tiny", *flags, *more]


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that a run that was started is ended with this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _engine_of(config: dict[str, Any]) -> str:
    """The engine of the default study that updates as a configuration says."""
    study = default_study()
    policy = config.get("deep_optimizer_states", {}).get("policy")
    rows = study.engines.items()
    found = (
        name
        for name, row in rows
        if policy and row.ds_config.get("deep_optimizer_states", {}).get("policy") == policy
    )
    return next(found, study.reference)


def _ran(ended: str) -> bool:
    return ended.startswith("ran")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run with the processes of its group: a launcher's ranks are among them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
