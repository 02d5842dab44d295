"""The host's side of an update, beside stock DeepSpeed's: ``python -m benchmarks.host``.

Two comparisons, for each number of threads in a process of its own:

- passes over one subgroup's arrays: our fused kernel, a probe that reads and writes the same bytes
  with next to no arithmetic, and the passes stock makes one after the other;
- ``engine.step()`` of two real DeepSpeed engines, stock ZeRO-3 offload and the plugin with policy
  ``all-host``, on the CPU.

Both sides start from the same bits and must end with the same bits, or there is no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.timing import Times, in_turns

if TYPE_CHECKING:
    from torch import Tensor

    from deep_optimizer_states.kernels.host import HostAdam, Tail
    from deep_optimizer_states.kernels.scalars import AdamScalars
    from deep_optimizer_states.kernels.tensors import AdamTensors

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
SETTINGS = (LR, *BETAS, EPS, WEIGHT_DECAY)
GRAD_SCALE = 0.5
_OP_ID = 9001  # DeepSpeed numbers its optimizers from 0


class StockPasses:
    """What stock DeepSpeed does to a subgroup, pass by pass, with its own compiled op.

    Args:
        op: DeepSpeed's ``cpu_adam``.
        master: Master weights to start from; copied.
        grad: bf16 gradients.
    """

    def __init__(self, op: Any, master: Tensor, grad: Tensor) -> None:  # noqa: ANN401 - untyped op
        import torch

        self._op = op
        self._grad = grad
        self._grad32 = torch.empty_like(master)
        self._steps = 0
        self.state = (master.clone(), torch.zeros_like(master), torch.zeros_like(master))
        self.weights = torch.empty_like(grad)
        op.create_adam(_OP_ID, *SETTINGS, True, False)

    def parts(self) -> dict[str, Callable[[], object]]:
        """The passes, in order."""
        return {
            "widen gradients": lambda: self._grad32.copy_(self._grad),
            "unscale": lambda: self._grad32.mul_(GRAD_SCALE),
            "CPUAdam": self._step,
            "narrow weights": lambda: self.weights.copy_(self.state[0]),
        }

    def _step(self) -> None:
        self._steps += 1
        master, exp_avg, exp_avg_sq = self.state
        state = (master, self._grad32, exp_avg, exp_avg_sq)
        self._op.adam_update(_OP_ID, self._steps, *SETTINGS, True, *state)


class FusedPass:
    """Our kernel on the same start.

    Args:
        adam: The kernel.
        tail: How it treats the last elements.
        start: Tensors of the subgroup; copied.
        num_threads: OpenMP threads.
    """

    def __init__(self, adam: HostAdam, tail: Tail, start: AdamTensors, num_threads: int) -> None:
        from deep_optimizer_states.kernels.scalars import BetaPowers

        self.tensors = replace(start, **{k: v.clone() for k, v in vars(start).items()})
        self._adam = adam
        self._tail_start = tail.start(start.numel)
        self._num_threads = num_threads
        self._powers = BetaPowers(BETAS)
        self._steps = 0

    def _scalars(self) -> AdamScalars:
        from deep_optimizer_states.kernels.scalars import adam_scalars

        self._steps += 1
        group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        powers = self._powers.at(self._steps, BETAS)
        return adam_scalars({**group, "bias_correction": True}, powers, GRAD_SCALE, True)

    def step(self) -> None:
        """One update."""
        self._adam.step(self.tensors, self._scalars(), self._tail_start, self._num_threads)

    def probe(self) -> None:
        """The same reads and writes, nearly without arithmetic."""
        self._adam.probe(self.tensors, self._scalars(), self._num_threads)


def passes(numel: int, repeats: int, num_threads: int) -> dict[str, Any]:
    """Time passes over one subgroup of ``numel`` elements with bf16 gradients and weights."""
    import torch
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from deep_optimizer_states.kernels.calibrate_tail import tail_of_op
    from deep_optimizer_states.kernels.host import HostAdam
    from deep_optimizer_states.kernels.tensors import AdamTensors

    op = CPUAdamBuilder().load()
    tail = tail_of_op(op, True)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(numel, generator=generator).bfloat16()
    master = torch.randn(numel, generator=generator)
    zeros = torch.zeros(numel)
    start = AdamTensors(master, zeros, zeros, grad, torch.empty_like(grad))
    adam = HostAdam(tail.mode)
    stock = StockPasses(op, master, grad)
    fused, probed = (FusedPass(adam, tail, start, num_threads) for _ in range(2))
    parts = stock.parts()
    times = in_turns({"fused": fused.step, "probe": probed.probe, **parts}, repeats)
    turns = zip(*(times[part].seconds for part in parts), strict=True)
    whole = Times(tuple(sum(turn) for turn in turns))
    ours = fused.tensors
    equal = all(map(torch.equal, ours.state, stock.state))
    return {
        "numel": numel,
        "instruction_set": adam.instruction_set.name,
        "equal": equal and torch.equal(ours.weights, stock.weights),
        "seconds_per_1e9": _rows({**times, "stock, all passes": whole}, numel),
        "stock_over_fused": whole.ratio_to(times["fused"]),
        "share_of_probe": times["probe"].ratio_to(times["fused"]),
    }


def engines(width: int, layers: int, repeats: int) -> dict[str, Any]:
    """Time the update phase of stock's engine and of the plugin's, on the same gradients."""
    import deepspeed
    import deepspeed.ops
    import torch

    import deep_optimizer_states

    # An extension that DeepSpeed would build for collectives of one machine; nothing here uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    deepspeed.init_distributed(dist_backend="gloo")
    deep_optimizer_states.install()
    made = {}
    for name, block in (
        ("stock", {"enabled": False}),
        ("all-host", {"enabled": True, "policy": "all-host", "just_in_time_forward": False}),
    ):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
        made[name] = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=_ds_config(width, block)
        )[0]
    inputs = torch.ones(1, width, dtype=torch.bfloat16)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(repeats + 2):
        for name, engine in made.items():
            engine.backward(engine(inputs).float().pow(2).mean())
            begin = time.perf_counter()
            engine.step()
            if turn >= 2:  # the first steps touch fresh pages
                taken[name].append(time.perf_counter() - begin)
    numel = width * width * layers
    times = {name: Times(tuple(seconds)) for name, seconds in taken.items()}
    weights = [engine.optimizer.fp16_partitioned_groups_flat for engine in made.values()]
    equal = all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    return {
        "numel": numel,
        "equal": equal,
        "seconds_per_1e9": _rows(times, numel),
        "stock_over_all_host": times["stock"].ratio_to(times["all-host"]),
    }


def _ds_config(width: int, block: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 2 * width * width,
            "reduce_bucket_size": width * width,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
        "deep_optimizer_states": block,
    }


def _rows(times: Mapping[str, Times], numel: int) -> dict[str, list[float]]:
    """Median and quartiles in seconds per 1e9 parameters."""
    return {
        name: [seconds / numel * 1e9 for seconds in (t.median_s, *t.quartiles_s)]
        for name, t in times.items()
    }


def measure(num_threads: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run both comparisons with a number of threads, in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its words are on standard error.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host", "--worker"]
    command += [f"--{name}={getattr(given, name)}" for name in ("numel", "width", "layers")]
    command += [f"--repeats={given.repeats}", "--threads", str(num_threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def as_text(results: list[dict[str, Any]]) -> str:
    """Both comparisons as tables; no ratio where the bits differ."""
    lines = ["measured on the host; seconds per 1e9 parameters, median (quartiles)"]
    for result in results:
        found, both = result["passes"], result["engines"]
        lines += ["", f"{result['threads']} thread(s), {found['instruction_set']}"]
        for name, (mid, low, high) in found["seconds_per_1e9"].items():
            lines.append(f"  {name:20} {mid:7.3f}  ({low:.3f} to {high:.3f})")
        lines.append(f"  {_ratio('stock / fused', found['stock_over_fused'], found['equal'])}")
        lines.append(f"  {_ratio('probe / fused', found['share_of_probe'], found['equal'])}")
        for name, (mid, low, high) in both["seconds_per_1e9"].items():
            lines.append(f"  step(), {name:12} {mid:7.3f}  ({low:.3f} to {high:.3f})")
        ratio = both["stock_over_all_host"]
        lines.append(f"  {_ratio('step(), stock / all-host', ratio, both['equal'])}")
    return "\n".join(lines)


def _ratio(name: str, value: float, equal: bool) -> str:
    return f"{name:26} {value:.2f}" if equal else f"{name:26} withheld: the bits differ"


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 when two sides did not end with the same bits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--numel", type=int, default=2**26, help="elements of a subgroup [2^26]")
    parser.add_argument("--width", type=int, default=4096, help="width of the engines' layers")
    parser.add_argument("--layers", type=int, default=4, help="layers of the engines")
    parser.add_argument("--repeats", type=int, default=9, help="turns [9]")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="[1 2]")
    parser.add_argument("--json", type=Path, help="write the figures to a new file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        (num_threads,) = given.threads
        result = {
            "threads": num_threads,
            "passes": passes(given.numel, given.repeats, num_threads),
            "engines": engines(given.width, given.layers, given.repeats),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        os._exit(0)  # gloo now and then aborts while the interpreter is torn down
    results = [measure(num_threads, given) for num_threads in given.threads]
    sys.stdout.write(as_text(results) + "\n")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        with given.json.open("x", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
    return int(not all(r["passes"]["equal"] and r["engines"]["equal"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
