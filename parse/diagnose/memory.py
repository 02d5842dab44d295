"""Out of device memory, and by what: the functions of the traceback tell; out of host memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from parse.diagnose.illness import Illness, known, quoted
from parse.diagnose.watcher import Run, Watcher
from parse.log.lines import Line

_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)|^\W*(\S+\.py):\d+ in (\w+)')
_TRACEBACK = "Traceback (most recent call last)"
_DEVICE = re.compile(
    r"(?:CUDA|HIP|NPU|XPU) out of memory\. Tried to allocate|"
    r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError: |"
    r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'"
)
_MOST_FRAMES, _MOST_RANKS = 80, 64
_ANYWHERE = (
    ("page-locked-memory", r"pin_memory|_pin_tensor|cudaHost|pinned"),
    ("device-memory-save", r"_?save_(?:\w*)?checkpoint|save_model|save_pretrained|save_16bit_model|"
     r"_consolidated_16bit_state_dict|_save_optimizer_and_scheduler|save_state"),
    ("device-memory-load", r"from_pretrained|load_\w*checkpoint|_load_from_checkpoint|"
     r"load_state_dict|_load_state_dict_into_\w+|_configure_distributed_model|load_model|"
     r"_move_model_to_device"),
)  # fmt: skip
_INNERMOST = (
    ("device-memory-gathers", r"all_gather\w*|fetch_sub_module|_all_gather_params|"
     r"partition_all_parameters|allgather_\w+|__all_gather\w*|all_gather_coalesced"),
    ("device-memory-buckets", r"\w*ipg_\w+|\w*reduce_\w*(?:grads?|bucket|partition)\w*|"
     r"_setup_for_real_optimizer|\w*allreduce\w*|all_reduce|flatten\w*|reduce_scatter\w*|"
     r"_create_\w*buffers?\w*|setup_buckets"),
    ("device-memory-states", r"initialize_optimizer_states|_initialize_\w*optimizer\w*|"
     r"_configure_\w*optimizer|_create_\w*partitions?|_init_group|_optimizer_step|optimizer_step|"
     r"_multi_tensor_\w+|_single_tensor_\w+|_fused_\w*adam\w*|\w*adamw?|take_model_step|unscale_\w+|"
     r"__setup_\w+|_unflatten_partition\w*"),
    ("device-memory-activations", r"forward|\w+_forward|backward|training_step|compute_loss|"
     r"\w*cross_entropy\w*|\w*attention\w*|softmax|checkpoint\w*|run_backward|apply"),
)  # fmt: skip
_OUTER = [(name, re.compile(pattern)) for name, pattern in _ANYWHERE]
_INNER = [(name, re.compile(pattern)) for name, pattern in _INNERMOST]
_NOT_INNER = {"initialize", "wrapped_fn", "wrapper", "decorate_context", "_call_impl"}


class DeviceMemoryWatcher(Watcher):
    """Sorts errors of the device's allocator by the frames above them."""

    words = ('File "', "\u2502", _TRACEBACK, "out of memory", "OutOfMemoryError")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # By the rank's prefix, since tracebacks of several ranks mix.
        self._frames: dict[str, deque[str]] = {}
        self._found: dict[str, Illness] = {}
        self._count = 0

    def feed(self, line: Line) -> None:
        """Keep the frames of the traceback, and look for the error at its end."""
        text = line.text
        if _TRACEBACK in text:
            self._frames[self._prefix(text, text.index(_TRACEBACK))] = deque(maxlen=_MOST_FRAMES)
        elif frame := _FRAME.search(text) if (".py" in text and " in " in text) else None:
            name = frame[2] or frame[4]
            self._of(self._prefix(text, frame.start())).append(name)
        elif error := _DEVICE.search(text):
            self._count += 1
            name = self._sort(text, error.start())
            self.run.note(name)
            self._found.setdefault(name, Illness(name, line.number, quoted(text, error)))

    def _prefix(self, text: str, start: int) -> str:
        return text[:start].strip()

    def _of(self, prefix: str) -> deque[str]:
        if len(self._frames) > _MOST_RANKS:
            self._frames.clear()
        return self._frames.setdefault(prefix, deque(maxlen=_MOST_FRAMES))

    def _sort(self, text: str, start: int) -> str:
        """What was allocated: saving and loading by any frame, the rest by the innermost one."""
        frames = self._frames.pop(self._prefix(text, start), None)
        if frames is None:
            frames = next(iter(self._frames.values()), deque())
        for name, pattern in _OUTER:
            if any(pattern.fullmatch(frame) for frame in frames):
                return name
        for frame in reversed(frames):
            for name, pattern in _INNER:
                if frame not in _NOT_INNER and pattern.fullmatch(frame.lower()):
                    return name
        return "device-memory"

    def illnesses(self) -> Iterator[Illness]:
        """One of each kind that ended the run."""
        for name, illness in self._found.items():
            if not self.run.went_on(name):
                yield illness


class HostMemoryWatcher(Watcher):
    """Says of a rank that was killed what it was doing, and how full the host was."""

    words = (
        *("aving", "oading", "save_checkpoint", "load_checkpoint", "from_pretrained", "esuming"),
        *("CPU Virtual Memory", *known()["host-memory"].words),
    )

    _PHASES = (
        ("saving", re.compile(r"(?i)saving (?:model )?checkpoint|save_checkpoint|Saving model")),
        ("loading", re.compile(r"(?i)loading checkpoint shards|from_pretrained|load_checkpoint|"
                               r"resuming from")),
    )  # fmt: skip
    _HOST = re.compile(r"CPU Virtual Memory:\s+used = [\d.]+ GB, percent = [\d.]+%")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._found: Illness | None = None
        self._any = re.compile("|".join(sign.pattern for sign in known()["host-memory"].signs))
        self._phase, self._host = "", ""
        self._steps = 0

    def feed(self, line: Line) -> None:
        """Keep the last phase and the last figure of host memory."""
        text = line.text
        for phase, pattern in self._PHASES:
            if pattern.search(text):
                self._phase, self._steps = phase, self.run.num_steps
        if host := self._HOST.search(text):
            self._host = host[0]
        if sign := self._any.search(text):
            self.run.note("host-memory")
            if self._found is None:
                self._found = Illness("host-memory", line.number, self._evidence(text, sign))

    def _evidence(self, text: str, sign: re.Match[str]) -> str:
        doing = self._phase if self._steps == self.run.num_steps else ""
        doing = doing or ("training" if self.run.num_steps else "setting up")
        host = f", last seen: {self._host}" if self._host else ""
        return f"{quoted(text, sign)} (while {doing}{host})"

    def illnesses(self) -> Iterator[Illness]:
        """Nothing, if the run went on."""
        if self._found is not None and not self.run.went_on("host-memory"):
            yield self._found
