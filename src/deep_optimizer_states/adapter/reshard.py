"""Load a ZeRO checkpoint into another number of ranks than saved it.

DeepSpeed's own ``load_checkpoint`` loads. For its length it is given the files that this number of
ranks would have saved: what it asks for is put together, for this rank alone, from slices of the
files that there are. So whatever DeepSpeed restores is restored, by its own code.

[Note: who holds what] A flat tensor of a file holds slices of parameters, one after the other. At
stage 3 it is a subgroup, and every rank has an equal part of every parameter, the last ones padded.
At stages 1 and 2 it is an equal part of a parameter group, which is padded at its end. The
checkpoint says which parameters there are and in which order, so that each slice is copied from
where it lies to where it belongs, and padding is not. ``param_slice_mappings`` are not read: with
``round_robin_gradients`` DeepSpeed lists parameters there in an order that is not the tensor's.
"""

from __future__ import annotations

import contextlib
import copy
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint import constants as keys
from deepspeed.utils import logger
from torch import Tensor, distributed as dist

from deep_optimizer_states.errors import CheckpointError

_MASTER, _MOMENTS = "master weights", ("exp_avg", "exp_avg_sq")
_ALIGNED = "param_alignment_paddings"
"""DeepSpeed's key, since 0.19.8, of the padding behind single parameters."""
_WAY_OUT = "load it on as many ranks as saved it, or convert it with deepspeed's ds_to_universal"


class Slice(NamedTuple):
    """Elements of a parameter that follow each other in a flat tensor.

    Attributes:
        name: The parameter's.
        first: The first of its elements.
        numel: How many there are.
        flat: Number of the flat tensor.
        start: Where the first one lies in it.
    """

    name: str
    first: int
    numel: int
    flat: int
    start: int


Flats = Sequence[Mapping[str, int]]
"""Elements of the parameters of each flat tensor, in order."""


def even_slices(flats: Flats, rank: int, num_ranks: int) -> tuple[list[Slice], list[int]]:
    """Cut parameters as ZeRO-3 does.

    Args:
        flats: The parameters.
        rank: Whose slices are asked for.
        num_ranks: How many ranks have an equal part of each.

    Returns:
        The slices without padding, and the elements of each flat tensor with it.
    """
    slices, numels = list[Slice](), list[int]()
    for flat, parameters in enumerate(flats):
        start = 0
        for name, numel in parameters.items():
            part = -(-numel // num_ranks)
            first = part * rank
            if first < numel:
                slices.append(Slice(name, first, min(part, numel - first), flat, start))
            start += part
        numels.append(start)
    return slices, numels


def group_slices(
    flats: Flats, rank: int, numels: Sequence[int], paddings: Sequence[Sequence[int]] | None = None
) -> list[Slice]:
    """Cut parameter groups as ZeRO-1 and ZeRO-2 do.

    Args:
        flats: The parameters.
        rank: Whose slices are asked for.
        numels: Elements of a rank's part of each group, padding included.
        paddings: Elements of padding behind each parameter; None for none.

    Returns:
        The slices without padding.
    """
    slices = list[Slice]()
    for flat, (parameters, numel_of_rank) in enumerate(zip(flats, numels, strict=True)):
        begin, start = numel_of_rank * rank, 0
        behind = paddings[flat] if paddings else [0] * len(parameters)
        for (name, numel), padding in zip(parameters.items(), behind, strict=True):
            low, high = max(start, begin), min(start + numel, begin + numel_of_rank)
            if low < high:
                slices.append(Slice(name, low - start, high - low, flat, low - begin))
            start += numel + padding
    return slices


def overlaps(wanted: Iterable[Slice], held: Iterable[Slice]) -> list[tuple[Slice, Slice]]:
    """Return what is wanted and held, of each the same elements, in pairs of slices."""
    of_name, pairs = dict[str, list[Slice]](), list[tuple[Slice, Slice]]()
    for one in held:
        of_name.setdefault(one.name, []).append(one)
    for want in wanted:
        for have in of_name.get(want.name, ()):
            first = max(want.first, have.first)
            numel = min(want.first + want.numel, have.first + have.numel) - first
            if numel > 0:
                pairs.append((_part(want, first, numel), _part(have, first, numel)))
    return pairs


def _part(whole: Slice, first: int, numel: int) -> Slice:
    start = whole.start + first - whole.first
    return whole._replace(first=first, numel=numel, start=start)


def put_together(
    wanted: Sequence[Slice],
    numels: Sequence[int],
    held: Sequence[Iterable[Slice]],
    read: Callable[[int], Mapping[str, Sequence[Tensor]]],
) -> dict[str, list[Tensor]]:
    """Copy slices from the flat tensors of all files into those of one rank.

    Args:
        wanted: The rank's slices.
        numels: Elements of each of its flat tensors.
        held: The slices of each file.
        read: Opens a file: kind -> its flat tensors, each 1-D. One file is open at a time.

    Returns:
        Kind -> new flat tensors on the CPU, in the types of the files, 0 where nothing belongs.
    """
    pairs = [overlaps(wanted, slices) for slices in held]
    made: dict[str, list[Tensor]] = {}
    for file in [file for file, found in enumerate(pairs) if found] or [0]:
        for kind, flats in read(file).items():
            if kind not in made:
                types = dict.fromkeys(range(len(numels)), flats[0].dtype if flats else None)
                types |= {to.flat: flats[of.flat].dtype for to, of in pairs[file]}
                made[kind] = [
                    torch.zeros(numel, dtype=types[flat], device="cpu")
                    for flat, numel in enumerate(numels)
                ]
            for to, of in pairs[file]:
                source = flats[of.flat].narrow(0, of.start, of.numel)
                made[kind][to.flat].narrow(0, to.start, to.numel).copy_(source)
    return made


@contextlib.contextmanager
def resharding(engine: Any, asked: Mapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed load, in the block, a checkpoint of any number of ranks; every rank must.

    Where the number is the engine's, nothing is done.

    Args:
        engine: One of ours.
        asked: The arguments of its ``load_checkpoint``, by name.

    Raises:
        CheckpointError: The checkpoint does not fit, or is not whole; on all ranks alike, before
            anything of the engine is changed.
    """
    tag, stage = asked.get("tag") or _latest(asked["load_dir"]), engine.zero_optimization_stage()
    has_moments = asked.get("load_optimizer_states", True) and not asked.get("load_module_only")
    # Without moments, stages 1 and 2 load weights alone, of which every rank has all.
    if tag is None or engine.load_universal_checkpoint() or (stage < 3 and not has_moments):
        yield
        return
    files = _Files(engine, asked["load_dir"], tag)
    saved_by = [number for number in _together(files.num_ranks) if number is not None]
    if not saved_by or set(saved_by) == {engine.seq_dp_world_size}:
        yield
        return
    checkpoint = _Resharded(engine, files, saved_by[0], bool(has_moments))
    _together(checkpoint.refuse_others)
    heads = _together(checkpoint.read_heads)
    _together(lambda: checkpoint.settle(heads))
    if dist.get_rank() == 0:
        logger.info(
            f"deep_optimizer_states: checkpoint {tag} of {saved_by[0]} ranks is loaded by "
            f"{engine.seq_dp_world_size}"
        )
    reader = engine.checkpoint_engine
    engine._get_all_ckpt_names = files.of_model_ranks
    reader.load = checkpoint.load
    try:
        yield
    finally:
        del engine._get_all_ckpt_names, reader.load


def _latest(folder: Any) -> str | None:
    latest = Path(folder, "latest")
    return latest.read_text().strip() if latest.is_file() else None


def _together(act: Callable[[], Any]) -> list[Any]:
    """Do it on every rank; return what each found, or raise on all what went wrong on one."""
    problem, found = None, None
    try:
        found = act()
    except Exception as error:  # noqa: BLE001 - the others would wait for this rank for ever
        is_ours = isinstance(error, CheckpointError)
        problem = str(error) if is_ours else f"{type(error).__name__}: {error}"
    of_all: list[Any] = [None] * dist.get_world_size()
    # torch's: at DeepSpeed's, which it does not know, its comms_logger calls exit(0).
    dist.all_gather_object(of_all, (problem, found))
    for rank, (theirs, _) in enumerate(of_all):
        if theirs:
            raise CheckpointError(f"{theirs} (rank {rank})")
    return [found for _, found in of_all]


class _Files:
    """The files of a checkpoint, by the rank that saved them."""

    def __init__(self, engine: Any, folder: Any, tag: str) -> None:
        self._engine, self._folder, self._tag = engine, folder, tag
        mpu = engine.mpu
        self.model_rank = 0 if mpu is None else int(mpu.get_model_parallel_rank())

    def model(self, rank: int) -> str:
        """Return the path of weights and counters."""
        return str(self._engine._get_ckpt_name(self._folder, self._tag, pp_placeholder=str(rank)))

    def of_model_ranks(self, *_asked: Any) -> list[str]:
        """Return the paths of weights and counters of each part of the model."""
        name = Path(self._engine._get_ckpt_name(self._folder, self._tag, "*", "0"))
        return sorted(map(str, name.parent.glob(name.name)))

    def optimizer(self, rank: int) -> str:
        """Return the path of master weights and moments."""
        is_bf16 = self._engine.bfloat16_enabled()
        place = (self._folder, self._tag, self.model_rank, rank)
        return str(self._engine._get_rank_zero_ckpt_name(*place, is_bf16))

    def num_ranks(self) -> int | None:
        """Return how many ranks saved it; None where this rank cannot see that."""
        own = self.model(dist.get_rank(group=self._engine.optimizer.dp_process_group))
        for path in (own, self.model(0)):
            if Path(path).is_file():
                with contextlib.suppress(CheckpointError, KeyError):  # DeepSpeed says what is wrong
                    return int(read_file(path)["dp_world_size"])
                return None
        for other in sorted(Path(own).parent.glob("*model_states.pt")):
            stage = read_file(str(other))["ds_config"]["zero_optimization"]["stage"]
            raise CheckpointError(
                f"{other} was saved at zero_optimization.stage = {stage}, and this engine has "
                f"{self._engine.zero_optimization_stage()} and asks for {Path(own).name}: set the "
                "same stage and parallel sizes"
            )
        return None


def read_file(path: str) -> dict[str, Any]:
    """Open a file that ``torch.save`` wrote; tensors are read when they are looked at.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is not whole; load another one")
    try:
        found = torch.load(
            path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read, load another checkpoint: {error}") from error
    return dict(found)


class _Resharded:
    """A checkpoint of other ranks, as this rank of this engine would have saved it."""

    def __init__(self, engine: Any, files: _Files, saved_by: int, has_moments: bool) -> None:
        self._engine, self._files, self._saved_by = engine, files, saved_by
        self._zero, self._has_moments = engine.optimizer, has_moments
        self._is_stage3 = engine.zero_optimization_stage() == 3
        self._rank = dist.get_rank(group=self._zero.dp_process_group)
        self._num_ranks = int(engine.seq_dp_world_size)
        self._saved_flats: list[dict[str, int]] = []
        self._held: list[list[Slice]] = []

    # What it holds, and whether that fits.

    def refuse_others(self) -> None:
        """Refuse what cannot be mapped, and another model.

        Raises:
            CheckpointError: It names what differs.
        """
        engine, saved = self._engine, read_file(self._files.model(0))
        sizes = (saved.get("mp_world_size"), engine.mp_world_size)
        wrong = [
            (
                sizes[0] != sizes[1],
                f"model parallel size {sizes[0]}, here {sizes[1]}: set the same",
            ),
            (engine.has_moe_layers, "experts, which lie on ranks of their own"),
            (saved.get("module") is None, "parts of a PipelineModule"),
            (not saved.get(keys.PARAM_SHAPES), f"no {keys.PARAM_SHAPES}, the sizes of parameters"),
        ]
        for is_wrong, text in wrong:
            if is_wrong:
                self._refuse(text)
        if engine.zero_elastic_checkpoint():
            raise CheckpointError(f"elastic_checkpoint = true: set it to false; or {_WAY_OUT}")
        self._refuse_other_model(engine._get_zero_param_shapes(), saved[keys.PARAM_SHAPES])
        if self._is_stage3 and saved.get(keys.FROZEN_PARAM_SHAPES):
            self._refuse_other_model([self._frozen_shapes], [saved[keys.FROZEN_PARAM_SHAPES]])
        self._saved_flats = _numels(saved[keys.PARAM_SHAPES])

    @property
    def _frozen_shapes(self) -> dict[str, Any]:
        engine = self._engine
        return dict(engine._get_zero_frozen_param_attributes(engine._get_param_shape_func))

    def _refuse_other_model(self, here: list[Any], saved: list[Any]) -> None:
        of_here, of_saved = [
            {name: tuple(shape) for group in groups for name, shape in group.items()}
            for groups in (here, saved)
        ]
        for name in {**of_saved, **of_here}:
            shape, own = of_saved.get(name, "none"), of_here.get(name, "none")
            if shape != own:
                self._refuse(f"another model: parameter {name} of shape {shape}, here {own}")

    def _refuse(self, what: str) -> None:
        ranks = f"{self._saved_by} ranks, which {self._num_ranks} are to load"
        raise CheckpointError(f"{self._files.model(0)} of {ranks}, has {what}; or {_WAY_OUT}")

    def read_heads(self) -> tuple[int, dict[int, Any]]:
        """Read the sizes in this rank's share of the files, so that each is read once for that.

        Raises:
            CheckpointError: A file is missing, damaged, or does not hold what it should.
        """
        heads = dict[int, Any]()
        for rank in range(self._rank, self._saved_by, self._num_ranks):
            heads[rank] = self._head_of(rank) if self._has_moments else None
            if self._is_stage3:
                read_file(self._files.model(rank))
        return self._files.model_rank, heads

    def _head_of(self, rank: int) -> tuple[list[int], Any]:
        path = self._files.optimizer(rank)
        try:
            saved = read_file(path)[keys.OPTIMIZER_STATE_DICT]
            flats, adam = self._flats_and_adam(saved)
            states, groups = list(adam["state"].values()), adam["param_groups"]
            padding = [0] * len(flats) if self._is_stage3 else saved[keys.GROUP_PADDINGS]
            numels = [flat.numel() + more for flat, more in zip(flats, padding, strict=True)]
            moments = [[state[key].numel() for state in states] for key in _MOMENTS if states]
            counts = saved[keys.PARTITION_COUNT]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} does not hold {error}; {_WAY_OUT}") from error
        steps = {int(state.get("step", 0)) for state in states}
        is_of_all = set(counts if isinstance(counts, list) else [counts]) == {self._saved_by}
        wrong = [
            (not is_of_all, f"{keys.PARTITION_COUNT} = {counts}"),
            (len(steps) > 1, f"different numbers of updates, {sorted(steps)}"),
            (any(of != numels for of in moments), f"moments of {moments} elements, not {numels}"),
            (
                len(groups) != len(self._zero.optimizer.param_groups),
                f"{len(groups)} parameter groups, here {len(self._zero.optimizer.param_groups)}",
            ),
        ]
        for is_wrong, text in wrong:
            if is_wrong:
                self._refuse(f"in {Path(path).name} {text}")
        return numels, saved.get(_ALIGNED)

    def _flats_and_adam(self, saved: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        if self._is_stage3:
            return saved[keys.FP32_FLAT_GROUPS], saved[keys.OPTIMIZER_STATE_DICT]
        return saved[keys.SINGLE_PARTITION_OF_FP32_GROUPS], saved[keys.BASE_OPTIMIZER_STATE]

    def settle(self, found: Sequence[tuple[int, dict[int, Any]]]) -> None:
        """Settle where each slice of state lies.

        Args:
            found: Every rank's :meth:`read_heads`.

        Raises:
            CheckpointError: The files do not hold every element of every parameter.
        """
        heads = dict[int, Any]()
        for model_rank, of_rank in found:
            heads |= of_rank if model_rank == self._files.model_rank else {}
        for rank in range(self._saved_by if self._has_moments else 0):
            numels, paddings = heads[rank]
            if self._is_stage3:
                slices, expected = even_slices(self._saved_flats, rank, self._saved_by)
            else:
                slices, expected = (
                    group_slices(self._saved_flats, rank, numels, paddings),
                    heads[0][0],
                )
            if numels != expected:
                self._refuse(f"flat tensors of {numels} elements on rank {rank}, not {expected}")
            self._held.append(slices)
        numel = sum(one.numel for slices in self._held for one in slices)
        needed = sum(numel for flat in self._saved_flats for numel in flat.values())
        if self._has_moments and numel != needed:
            self._refuse(f"{numel} elements of state for {needed} of parameters")

    # What DeepSpeed asks for.

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Stand in for the checkpoint engine's method of that name."""
        if path == self._files.optimizer(self._rank):
            return {keys.OPTIMIZER_STATE_DICT: self._optimizer_states()}
        saved = read_file(path)
        if self._is_stage3 and saved.get(keys.FROZEN_PARAM_FRAGMENTS):
            saved[keys.FROZEN_PARAM_FRAGMENTS] = self._frozen_fragments()
        # What the caller keeps must not read a file that the next save overwrites.
        return copy.deepcopy({**saved, "dp_world_size": self._num_ranks})

    def _frozen_fragments(self) -> dict[str, Tensor]:
        names, kind = list(self._frozen_shapes), keys.FROZEN_PARAM_FRAGMENTS
        flats = [{name: _numels([self._frozen_shapes])[0][name]} for name in names]

        def read(rank: int) -> dict[str, list[Tensor]]:
            fragments = read_file(self._files.model(rank))[kind]
            return {kind: [fragments[name].view(-1) for name in names]}

        held = [even_slices(flats, rank, self._saved_by)[0] for rank in range(self._saved_by)]
        wanted, numels = even_slices(flats, self._rank, self._num_ranks)
        return dict(zip(names, put_together(wanted, numels, held, read)[kind], strict=True))

    def _optimizer_states(self) -> dict[str, Any]:
        zero, flats = self._zero, _numels(self._engine._get_zero_param_shapes())
        aligned = getattr(zero, "round_robin_bit16_padding", None)
        if self._is_stage3:
            wanted, numels = even_slices(flats, self._rank, self._num_ranks)
            group_of = [int(zero.sub_group_to_group_id[idx]) for idx in range(len(flats))]
        else:
            numels = [int(numel) for numel in zero.partition_size]
            group_of = list(range(len(flats)))
            wanted = group_slices(flats, self._rank, numels, aligned)
        rest = list[Any]()

        def read(rank: int) -> dict[str, list[Tensor]]:
            saved = read_file(self._files.optimizer(rank))[keys.OPTIMIZER_STATE_DICT]
            masters, adam = self._flats_and_adam(saved)
            states = [adam["state"][idx] for idx in sorted(adam["state"])]
            if not rest:
                counters = {
                    key: it for key, it in (states or [{}])[0].items() if key not in _MOMENTS
                }
                other = {
                    key: it for key, it in saved.items() if it is not masters and it is not adam
                }
                rest.extend(copy.deepcopy((other, counters, adam["param_groups"])))
            moments = {key: [state[key] for state in states] for key in _MOMENTS if states}
            return {_MASTER: masters, **moments}

        moments = put_together(wanted, numels, self._held, read)
        masters = moments.pop(_MASTER)
        other, counters, groups = rest
        for number, group in enumerate(groups):
            group["params"] = [idx for idx, of in enumerate(group_of) if of == number]
        state = {
            idx: {**counters, **{key: flats[idx] for key, flats in moments.items()}}
            for idx in (range(len(masters)) if moments else ())
        }
        adam = {"state": state, "param_groups": groups}
        if self._is_stage3:
            return {**other, keys.FP32_FLAT_GROUPS: masters, keys.OPTIMIZER_STATE_DICT: adam}
        own = {keys.SINGLE_PARTITION_OF_FP32_GROUPS: masters, keys.BASE_OPTIMIZER_STATE: adam}
        return {**other, **own, keys.GROUP_PADDINGS: zero.groups_padding, _ALIGNED: aligned}


def _numels(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    return [{name: torch.Size(shape).numel() for name, shape in it.items()} for it in groups]
