"""Gradients of ZeRO-1 and ZeRO-2, from stock's buckets to the update.

[Note: scaled late] Before its update stock multiplies the gradients of a group by one factor, which
unscales and clips them: a pass over memory of its own. Our kernels apply the factor while they read
a gradient, so it is not written back. But a parameter that takes no part in the next window is
updated with its old gradient again, multiplied twice then; and a user may look at gradients after a
step. So each parameter's gradient *owes* the last factor, until new content replaces it, the next
update reads it, or somebody looks.

[Note: kept gradients] In backward stock copies gradients to what it finds as ``grad`` of its master
weights, on the stream that computes. So it finds a :class:`GradientTarget` there, which sends them
on the ``grads`` lane, behind backward. Stock keeps them in fp32; here they have the type in which
backward sums them, which loses nothing. The gradient of a cached tile stays where its state is,
once an update has brought it there.

[Note: gradients in fp32] What is multiplied, or written by a user, needs fp32. The gradient of such
a parameter has an fp32 tensor of its own, until stock writes a new one. Meanwhile the CPU steps the
subgroups that have elements of the parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from typing_extensions import override

from deep_optimizer_states.adapter.flushes import Flushes
from deep_optimizer_states.adapter.homes import SubgroupSlice
from deep_optimizer_states.adapter.launcher import Gradients
from deep_optimizer_states.adapter.zero12.stock import Stock, runs_within
from deep_optimizer_states.core.cache import TileCache
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.plan import Tile


@dataclasses.dataclass(frozen=True)
class _Owing:
    """What tells a parameter's gradient from its copy beside state.

    It is replaced as a whole, so that Ctrl-C finds the factor applied and gone, or neither.
    """

    factor: float = 1.0
    in_fp32: Tensor | None = None
    """1-D, and what the factor is owed to; None for the copy beside state."""


class LateScaled(Gradients):
    """The gradients of this rank, and what they are still to be multiplied with.

    See [Note: kept gradients] and [Note: gradients in fp32].

    Attributes:
        is_writing: Whether stock writes gradients now, which are not to be scaled.
        targets: What stands in for the master weights meanwhile, one for each parameter group.

    Args:
        stock: DeepSpeed's optimizer.
        slices: Its subgroups.
        lanes: What gradients are sent on, home or to tiles that are on the device.
        cache: Which those are.
        wait: Waits for the update in flight, which reads gradients as they are.
    """

    def __init__(
        self,
        stock: Stock,
        slices: Sequence[SubgroupSlice],
        lanes: Device,
        cache: TileCache,
        wait: Callable[[], None],
    ) -> None:
        self.dtype = stock.gradient_accumulation_dtype
        self._stock = stock
        self._slices = slices
        self._cache = cache
        # Stock has one such copy at a time. A bucket of them goes home behind the next bucket.
        self._flushes = Flushes(lanes, stock.reduce_bucket_size * self.dtype.itemsize)
        self._wait = wait
        self._grads: list[Tensor] = []
        self._runs: dict[SubgroupSlice, list[Tile]] = {}
        self._owing: dict[int, _Owing] = {}
        self._is_reading = False
        self.targets: list[GradientTarget] = []
        self.is_writing = False

    def take(self, grads: list[Tensor]) -> None:
        """Work on these: one for each parameter group, 1-D."""
        self._grads = grads
        wholes = [SubgroupSlice(group, 0, grad.numel()) for group, grad in enumerate(grads)]
        self.targets = [GradientTarget(self, whole) for whole in wholes]

    @contextlib.contextmanager
    def writing(self, param_id: int | None = None) -> Iterator[None]:
        """Let stock write gradients.

        Args:
            param_id: The parameter whose gradient is replaced; None for none.
        """
        if param_id is not None:
            self._owing.pop(param_id, None)
        before, self.is_writing = self.is_writing, True
        try:
            yield
        finally:
            self.is_writing = before

    def write(self, part: SubgroupSlice, source: Tensor) -> None:
        """Copy a new gradient to where it is kept, without waiting for the copy.

        Args:
            part: Elements of a group.
            source: Their gradient, 1-D, which later work of the caller's may overwrite.
        """
        value, runs = source.to(self.dtype, copy=True), self._runs_of(part)
        homes = [self._cache.grads_of(run, self.beside_state(run.subgroup)) for run in runs]
        name = f"elements {part.start} to {part.start + part.numel} of group {part.master}"
        self._flushes.send(name, value, list(itertools.chain.from_iterable(homes)))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let gradients be read which nobody writes to."""
        before, self._is_reading = self._is_reading, True
        try:
            yield
        finally:
            self._is_reading = before

    def look(self, param_id: int) -> Tensor:
        """Return what stock holds for a parameter of which this rank has something, 1-D, in fp32.

        The next update goes by what is written there.

        Raises:
            UpdateError: A lane failed, or an update.
        """
        owing = self._owing.get(param_id, _Owing())
        if owing.in_fp32 is None:
            part = self._part_of(param_id)
            self.bring_home(self._runs_of(part))
        else:
            self._wait()
        with torch.inference_mode(False):  # it may outlast the caller's
            if owing.in_fp32 is None:
                value = part.of(self._grads[part.master]).to(torch.float32, copy=True)
            else:
                value = owing.in_fp32
            if self._is_reading or owing.factor != 1.0:
                value = value * owing.factor
        if not self._is_reading:
            self._owing[param_id] = _Owing(in_fp32=value)
        return value

    def bring_home(self, runs: Iterable[Tile]) -> None:
        """Have gradients of some runs of elements at home until the next update.

        Raises:
            UpdateError: A lane failed, or an update.
        """
        self._wait()
        self.drain()
        tiles = dict.fromkeys(tile for run in runs for tile in self._cache.schedule.tiles_of(run))
        self._cache.bring_grads_home(tiles)

    @override
    def stale_grads_upcast(self) -> dict[int, Tensor]:
        for param_id in [it for it, owing in self._owing.items() if owing.factor != 1.0]:
            self.look(param_id)
        values = {
            param_id: owing.in_fp32
            for param_id, owing in self._owing.items()
            if owing.in_fp32 is not None
        }
        parts = {param_id: self._runs_of(self._part_of(param_id)) for param_id in values}
        subgroups = sorted({run.subgroup for runs in parts.values() for run in runs})
        if not subgroups:
            return {}
        self.bring_home(Tile(idx, 0, self._slices[idx].numel) for idx in subgroups)
        found = {idx: self.beside_state(idx).to(torch.float32, copy=True) for idx in subgroups}
        for param_id, runs in parts.items():
            value, start = values[param_id], 0
            for run in runs:
                piece = value.narrow(0, start, run.numel)
                found[run.subgroup].narrow(0, run.start, run.numel).copy_(piece)
                start += run.numel
        return found

    def _part_of(self, param_id: int) -> SubgroupSlice:
        group, _, start, numel = self._stock.grad_position[param_id]
        return SubgroupSlice(group, start, numel)

    def _runs_of(self, part: SubgroupSlice) -> list[Tile]:
        if part not in self._runs:
            self._runs[part] = runs_within(self._slices, part)
        return self._runs[part]

    @override
    def stepped(self, factor: float) -> None:
        kept = self._owing
        self._owing = {
            param_id: dataclasses.replace(kept.get(param_id, _Owing()), factor=factor)
            for param_id in self._stock.grad_position
        }

    @override
    def beside_state(self, subgroup: int) -> Tensor:
        part = self._slices[subgroup]
        return part.of(self._grads[part.master])

    @property
    @override
    def have_failed(self) -> bool:
        return self._flushes.have_failed

    @override
    def drain(self) -> None:
        self._flushes.drain()

    @override
    def forget_flushes(self) -> None:
        self._flushes.forget()

    def close(self) -> None:
        """Stop waiting for gradients: the lanes are about to end."""
        self._flushes.close()


class GradientTarget:
    """Stands in for a master weight, for its ``grad`` and for what stock cuts out of that."""

    def __init__(self, gradients: LateScaled, part: SubgroupSlice) -> None:
        self._gradients = gradients
        self._part = part

    @property
    def dtype(self) -> torch.dtype:
        """The type that stock may give them in."""
        return self._gradients.dtype

    @property
    def grad(self) -> GradientTarget:
        """The gradients of its elements."""
        return self

    def view(self, _numel: int) -> GradientTarget:
        """Return it as 1-D, which it is."""
        return self

    def narrow(self, _dim: int, start: int, numel: int) -> GradientTarget:
        """Return elements ``start`` to ``start + numel``."""
        part = SubgroupSlice(self._part.master, self._part.start + start, numel)
        return GradientTarget(self._gradients, part)

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        """Let these gradients be ``source``, 1-D; whoever reads them waits for the copy."""
        assert non_blocking, "stock would read them at once"
        self._gradients.write(self._part, source)


class _LookedAfter(list[Any]):
    """A list of stock's whose items are looked after when they are taken out.

    ``list`` joins two lists without taking their items out, so that is written here.
    """

    def __add__(self, other: Any) -> Any:
        return list(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + list(self)


class SettledMasters(_LookedAfter):
    """Stands in for Adam's list of a group's master weights: whoever takes one out may write it."""

    def __init__(self, masters: Iterable[Tensor], settle: Callable[[], None]) -> None:
        super().__init__(masters)
        self._settle = settle

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._settle()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Tensor]:
        self._settle()
        return super().__iter__()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        return list, (list(self),)  # a copy is not of this optimizer


class SettledFragments(_LookedAfter):
    """Stands in for stock's list of a group's gradients: asked for one, it returns that in fp32."""

    def __init__(self, param_ids: Iterable[int], gradients: LateScaled) -> None:
        super().__init__(param_ids)
        self._gradients = gradients

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, list):
            return [self._gradients.look(param_id) for param_id in found]
        return self._gradients.look(found)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])
