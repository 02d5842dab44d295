"""Whole iterations of real engines beside the shortest that they can be, on an emulated device.

``python -m benchmarks.iteration``: a model whose layers take a fixed time, links and a CPU lane
that take a fixed time for each byte and parameter (they sleep), and DeepSpeed's own loop around
them. What is timed is the schedule: nothing here says how fast a GPU is. Every way starts from the
same weights, and must end with the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import BenchmarkError, as_table, check_output, machine_facts, write_json

LAYERS = 24
WIDTH = 1024
"""A layer is one matrix of 1 Mi parameters, and one tile."""
FORWARD_S = 0.025
"""Of a layer; its backward takes twice that."""
LINK_BYTES_PER_S = 200e6
"""Each way."""
HOST_PARAMETERS_PER_S = 18e6
DEVICE_PARAMETERS_PER_S = 1e9
STATE_BYTES, GRAD_BYTES, WEIGHT_BYTES = 12, 2, 2
MODES: Mapping[str, dict[str, Any]] = {
    "after the norm": {},
    "prefetched": {"prefetch_memory_bytes": "auto"},
    "before the norm": {"step_before_norm": True},
    "both": {"step_before_norm": True, "prefetch_memory_bytes": "auto"},
}
POLICIES: Mapping[str, dict[str, Any]] = {
    "all-host": {"policy": "all-host"},
    "stride 3": {"policy": "stride", "stride": 3},
    "dynamic": {"policy": "dynamic"},
}
WARM_UP = {"dynamic": 14}
"""Iterations that do not count; a split that is found while it runs needs more of them."""


@dataclass(frozen=True)
class Rates:
    """What the emulated machine can do."""

    forward_s: float = FORWARD_S
    link_bytes_per_s: float = LINK_BYTES_PER_S
    host_parameters_per_s: float = HOST_PARAMETERS_PER_S
    device_parameters_per_s: float = DEVICE_PARAMETERS_PER_S

    def bound_s(self, numel: int, computing_s: float) -> tuple[float, float]:
        """The shortest iteration, and the device's share of the update with which it is reached.

        Args:
            numel: Parameters.
            computing_s: Forward and backward alone.
        """

        def seconds(share: float) -> float:
            to_device = (STATE_BYTES + GRAD_BYTES) * share + WEIGHT_BYTES * (1 - share)
            return max(
                computing_s,
                numel * (1 - share) / self.host_parameters_per_s,
                numel * to_device / self.link_bytes_per_s,
                numel * (STATE_BYTES * share + GRAD_BYTES) / self.link_bytes_per_s,
            )

        best = min(range(201), key=lambda step: seconds(step / 200))
        return seconds(best / 200), best / 200


class Machine:
    """Makes copies and steps of this process take the time that ``rates`` say."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._links: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies of one lane; lanes of one direction share its link, a piece at a time."""
        lane = threading.current_thread().name.rpartition("/")[2]
        link = "to" if lane in ("H2D", "weights") else "from"
        for target, source in zip(targets, sources, strict=True):
            with self._links[link]:
                begin = time.perf_counter()
                target.copy_(source)
                _sleep_until(begin + target.nbytes / self._rates.link_bytes_per_s)

    def step(self, adam: Any, *args: Any, **kwargs: Any) -> None:
        """Adam of the CPU lane, or of the lane that stands for the device."""
        on_device = threading.current_thread().name.endswith("/GPU")
        rates = self._rates
        rate = rates.device_parameters_per_s if on_device else rates.host_parameters_per_s
        begin = time.perf_counter()
        adam.step(*args, **kwargs)
        _sleep_until(begin + args[0].numel / rate)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class _Adam:
    def __init__(self, adam: Any, machine: Machine) -> None:
        self._adam, self._machine = adam, machine

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._machine.step(self._adam, *args, **kwargs)


class _Delay(torch.autograd.Function):
    """Lets forward and backward of a layer take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class _Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        delayed: Tensor = _Delay.apply(x, self._seconds)  # type: ignore[no-untyped-call, unused-ignore]
        return delayed + 0.1 * torch.tanh(self.linear(delayed))


def emulate(machine: Machine) -> None:
    """Let the plugin's copies and steps in this process be those of ``machine``."""
    from deep_optimizer_states import executor
    from deep_optimizer_states.zero import steppers
    from deep_optimizer_states.zero3 import gradients

    make = vars(steppers)["make_host_adam"]
    setattr(steppers, "make_host_adam", lambda mode: _Adam(make(mode), machine))  # noqa: B010
    for module in (executor, gradients):
        setattr(module, "copy_all", machine.copy)  # noqa: B010


def make_engine(block: Mapping[str, Any], sizes: tuple[int, int], rates: Rates) -> Any:
    """A DeepSpeed engine of the emulated model.

    Args:
        block: Of the plugin.
        sizes: Layers, and their width.
        rates: For the time of a layer.
    """
    import deepspeed

    layers, width = sizes
    torch.manual_seed(1)
    model = nn.Sequential(*(_Layer(width, rates.forward_s) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": width * width,
            "stage3_param_persistence_threshold": 0,
            # Each gradient is reduced, and its tile handed over, when its layer is done.
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": width * width,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "deep_optimizer_states": {
            "enabled": True,
            "tile_numel": width * width,
            "verify_every": 0,
            "keep_grads_on_device": False,
            **block,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def time_iterations(engine: Any, width: int, number: int) -> Iterator[float]:
    """Seconds of each iteration, from one ``step()``'s return to the next."""
    generator = torch.Generator().manual_seed(2)
    begin = time.perf_counter()
    for _ in range(number):
        x = torch.randn(1, width, generator=generator).bfloat16()
        engine.backward((engine(x).float() ** 2).mean())
        engine.step()
        end = time.perf_counter()
        yield end - begin
        begin = end


def time_computing(sizes: tuple[int, int], rates: Rates) -> float:
    """Seconds of forward and backward through DeepSpeed, without any update."""
    engine = make_engine({"policy": "all-host"}, sizes, rates)
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        engine.backward((engine(torch.ones(1, sizes[1]).bfloat16()) ** 2).mean())
        found.append(time.perf_counter() - begin)
    engine.destroy()
    return min(found)


def run(
    ways: Sequence[tuple[str, str]],
    sizes: tuple[int, int],
    rates: Rates,
    counted: int,
    say: Callable[[str], None],
    timeline: str = "",
) -> dict[str, Any]:
    """Time every way.

    Returns:
        ``computing_s``, ``bound_s``, ``share`` of the device in it, ``ways`` (rows) and ``equal``:
        whether all ended with the same bits after as many iterations.
    """
    from deep_optimizer_states.state_reader import digest, read_state

    computing_s = time_computing(sizes, rates)
    bound_s, share = rates.bound_s(sizes[0] * sizes[1] ** 2, computing_s)
    rows: list[dict[str, Any]] = []
    ends = set()
    for policy, mode in ways:
        folder = str(Path(timeline) / f"{policy}-{mode}".replace(" ", "-")) if timeline else ""
        engine = make_engine({**POLICIES[policy], **MODES[mode], "timeline": folder}, sizes, rates)
        most = max(WARM_UP.values()) + counted
        times = list(time_iterations(engine, sizes[1], most))
        tensors = [(*state.weights, *state.masters, *state.moments) for state in read_state(engine)]
        ends.add(digest(itertools.chain.from_iterable(tensors)))
        engine.destroy()
        middle = median(times[WARM_UP.get(policy, 4) :])
        rows.append({"policy": policy, "mode": mode, "seconds": times, "median_s": middle})
        say(f"{policy}, {mode}: {middle:.3f} s, {bound_s / middle:.0%} of the bound")
    return {
        "computing_s": computing_s,
        "bound_s": bound_s,
        "share": share,
        "ways": rows,
        "equal": len(ends) == 1,
    }


def as_text(found: Mapping[str, Any]) -> str:
    """A table for people."""
    bound = found["bound_s"]
    cells = {(row["policy"], row["mode"]): row["median_s"] for row in found["ways"]}
    modes = list(dict.fromkeys(mode for _, mode in cells))
    rows = [
        [policy, *(_cell(cells.get((policy, mode)), bound) for mode in modes)]
        for policy in dict.fromkeys(policy for policy, _ in cells)
    ]
    return "\n".join(
        [
            "Seconds of an iteration on an emulated device, and the bound's share of them.",
            f"Bound {bound:.3f} s: computing {found['computing_s']:.3f} s, "
            f"{found['share']:.0%} of the update on the device.",
            "",
            as_table(["policy", *modes], rows),
            "",
            "Same bits everywhere." if found["equal"] else "THE BITS DIFFER: no time counts.",
        ]
    )


def _cell(seconds: float | None, bound_s: float) -> str:
    return "" if seconds is None else f"{seconds:.3f}, {bound_s / seconds:.0%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Returns:
        0, or 1 if the bits of two ways differ.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iteration", description=__doc__)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--counted", type=int, default=8, help="iterations after the warm-up")
    parser.add_argument("--small", action="store_true", help="two layers: that it runs at all")
    parser.add_argument("--timeline", default="", help="folder for what every lane did")
    parser.add_argument("--json", type=Path, help="also write the figures to this new file")
    given = parser.parse_args(argv)
    try:
        check_output(given.json)
    except BenchmarkError as error:
        parser.error(str(error))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import deepspeed

    import deep_optimizer_states

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without it
    store = vars(torch.distributed)["HashStore"]()  # one process needs no address
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    deep_optimizer_states.install()
    rates = Rates(forward_s=0.001, link_bytes_per_s=1e9) if given.small else Rates()
    emulate(Machine(rates))
    sizes = (2, 64) if given.small else (LAYERS, WIDTH)
    ways = list(itertools.product(given.policies, given.modes))

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    found = run(ways, sizes, rates, given.counted, say, given.timeline)
    if given.json is not None:
        write_json(given.json, {**found, "machine": machine_facts()})
    sys.stdout.write(as_text(found) + "\n")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
