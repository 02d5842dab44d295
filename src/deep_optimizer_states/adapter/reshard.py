"""Load a ZeRO checkpoint into another number of ranks than saved it.

DeepSpeed's own ``load_checkpoint`` loads. For its length it is given the files that this number of
ranks would have saved: what it asks for is put together, for this rank alone, from slices of the
files that there are. So whatever DeepSpeed restores is restored, by its own code.

[Note: who holds what] A flat tensor of a file holds slices of parameters, one after the other. At
stage 3 it is a subgroup, and every rank has an equal part of every parameter, the last ones padded.
At stages 1 and 2 it is a part of a parameter group, and the file lists its slices; what ranks have
of a parameter follows in the order of the ranks. Both are known of the files and of this engine, so
that each slice is copied from where it lies to where it belongs. Nothing else, padding neither, is.
"""

from __future__ import annotations

import contextlib
import copy
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint import constants as keys
from deepspeed.utils import logger
from torch import Tensor
from torch import distributed as dist

from deep_optimizer_states.errors import CheckpointError

_MASTER, _MOMENTS = "master weights", ("exp_avg", "exp_avg_sq")
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


def even_slices(
    flats: Sequence[Mapping[str, int]], rank: int, num_ranks: int
) -> tuple[list[Slice], list[int]]:
    """Cut parameters as ZeRO-3 does.

    Args:
        flats: Elements of the parameters of each flat tensor, in order.
        rank: Whose slices are asked for.
        num_ranks: How many ranks have an equal part each.

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


def listed_slices(ranks: Iterable[Sequence[Mapping[str, Any]]]) -> list[list[Slice]]:
    """Read the lists of ZeRO-1 and ZeRO-2.

    Args:
        ranks: Of every rank in order, and of every flat tensor: name of a parameter -> its
            ``numel`` and ``start`` there, as DeepSpeed's ``param_slice_mappings``.

    Returns:
        The slices of every rank.
    """
    found, seen = list[list[Slice]](), Counter[str]()
    for flats in ranks:
        found.append([])
        for flat, listed in enumerate(flats):
            for name, at in listed.items():
                found[-1].append(Slice(name, seen[name], at.numel, flat, at.start))
                seen[name] += at.numel
    return found


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
                return int(read_file(path)["dp_world_size"])
        for path in sorted(Path(self._folder, str(self._tag)).glob("*model_states.pt")):
            zero = read_file(path).get("ds_config", {}).get("zero_optimization", {})
            raise CheckpointError(
                f"{path.parent} has {path.name} and not {Path(own).name}: it was saved at "
                f"zero_optimization.stage = {zero.get('stage')} or in other parallel sizes, and "
                f"this engine has stage {self._engine.zero_optimization_stage()}; set the same"
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
        self._zero = engine.optimizer
        self._is_stage3 = engine.zero_optimization_stage() == 3
        self._has_moments = has_moments
        self._rank = dist.get_rank(group=self._zero.dp_process_group)
        self._num_ranks = int(engine.seq_dp_world_size)
        self._shapes = [dict(group) for group in engine._get_zero_param_shapes()]
        self._held: list[list[Slice]] = []
        self._wanted: list[Slice] = []
        self._numels: list[int] = []

    # What it holds, and whether that fits.

    def refuse_others(self) -> None:
        """Refuse what cannot be mapped, and another model.

        Raises:
            CheckpointError: It names what differs.
        """
        engine, saved = self._engine, read_file(self._files.model(0))
        sizes = (saved.get("mp_world_size"), engine.mp_world_size)
        wrong = [
            (sizes[0] != sizes[1], "model parallel size: {} in the checkpoint, {} here", sizes),
            (engine.has_moe_layers, "the model has experts, which lie on ranks of their own", ()),
            (saved.get("module") is None, "a PipelineModule saved it", ()),
            (engine.zero_elastic_checkpoint(), "elastic_checkpoint is true: set it to false", ()),
        ]
        for is_wrong, text, values in wrong:
            if is_wrong:
                self._refuse(text.format(*values))
        self._compare(self._shapes, saved.get(keys.PARAM_SHAPES), "trained")
        if self._is_stage3 and saved.get(keys.FROZEN_PARAM_FRAGMENTS) is not None:
            self._compare([self._frozen_shapes], [saved[keys.FROZEN_PARAM_SHAPES]], "frozen")
        self._saved_shapes = [dict(group) for group in saved[keys.PARAM_SHAPES]]

    @property
    def _frozen_shapes(self) -> dict[str, Any]:
        engine = self._engine
        return dict(engine._get_zero_frozen_param_attributes(engine._get_param_shape_func))

    def _compare(self, here: list[Any], saved: list[Any] | None, kind: str) -> None:
        if saved is None:
            self._refuse(f"it does not hold {keys.PARAM_SHAPES}, the sizes of its parameters")
        both = [
            {name: tuple(shape) for group in groups for name, shape in group.items()}
            for groups in (saved or [], here)
        ]
        for name in {**both[0], **both[1]}:
            shapes = [found.get(name, "none") for found in both]
            if shapes[0] != shapes[1]:
                self._refuse(
                    f"it is of another model: the {kind} parameter {name} has shape {shapes[0]} in "
                    f"the checkpoint and {shapes[1]} here"
                )

    def _refuse(self, why: str) -> None:
        ranks = f"{self._saved_by} ranks cannot be loaded by {self._num_ranks}"
        raise CheckpointError(f"{self._files.model(0)} of {ranks}: {why}. Or {_WAY_OUT}")

    def read_heads(self) -> tuple[int, dict[int, Any], Any]:
        """Read what this rank's share of the files holds, so that each is read for that once."""
        heads = {}
        for rank in range(self._rank, self._saved_by, self._num_ranks):
            if self._has_moments:
                heads[rank] = self._head_of(rank)
            if self._is_stage3:
                read_file(self._files.model(rank))
        own = None if self._is_stage3 else self._zero._param_slice_mappings
        return self._files.model_rank, heads, (self._rank, own)

    def _head_of(self, rank: int) -> dict[str, Any]:
        path = self._files.optimizer(rank)
        try:
            saved = read_file(path)[keys.OPTIMIZER_STATE_DICT]
            flats, adam = self._flats_and_adam(saved)
            states = adam["state"]
            stage, counts = int(saved[keys.ZERO_STAGE]), saved[keys.PARTITION_COUNT]
            listed = None if self._is_stage3 else saved[keys.PARAM_SLICE_MAPPINGS]
            moments = [[state[key].numel() for key in _MOMENTS] for state in states.values()]
            steps = {int(state.get("step", 0)) for state in states.values()} or {0}
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} does not hold {error}; {_WAY_OUT}") from error
        numels = [flat.numel() for flat in flats]
        counts = {int(count) for count in (counts if isinstance(counts, list) else [counts])}
        fits = [
            (stage == self._engine.zero_optimization_stage(), f"zero_optimization.stage = {stage}"),
            (counts == {self._saved_by}, f"partition_count {counts}, not {self._saved_by}"),
            (len(states) in (0, len(flats)), f"moments of {len(states)} of {len(flats)} parts"),
            (len(steps) == 1, f"different numbers of updates, {sorted(steps)}"),
            (
                all(min(of) >= numel for of, numel in zip(moments, numels, strict=False)),
                f"moments of {moments} elements beside master weights of {numels}",
            ),
            (
                len(adam["param_groups"]) == len(self._zero.optimizer.param_groups),
                f"{len(adam['param_groups'])} parameter groups",
            ),
        ]
        wrong = [text for is_right, text in fits if not is_right]
        if wrong:
            self._refuse(f"{Path(path).name} has {' and '.join(wrong)}")
        return {"numels": numels, "listed": listed}

    def _flats_and_adam(self, saved: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        if self._is_stage3:
            return saved[keys.FP32_FLAT_GROUPS], saved[keys.OPTIMIZER_STATE_DICT]
        return saved[keys.SINGLE_PARTITION_OF_FP32_GROUPS], saved[keys.BASE_OPTIMIZER_STATE]

    def settle(self, found: Sequence[tuple[int, dict[int, Any], Any]]) -> None:
        """Settle where each slice lies and belongs.

        Args:
            found: Every rank's :meth:`read_heads`.

        Raises:
            CheckpointError: The files do not hold every element of every parameter.
        """
        own = [one for one in found if one[0] == self._files.model_rank]
        heads = {rank: head for _, of_rank, _ in own for rank, head in of_rank.items()}
        if not heads:
            return
        saved = range(self._saved_by)
        if self._is_stage3:
            cut = [even_slices(_numels(self._saved_shapes), rank, self._saved_by) for rank in saved]
            self._held = [slices for slices, _ in cut]
            is_whole = all(heads[rank]["numels"] == numels for rank, (_, numels) in enumerate(cut))
            shapes = _numels(self._shapes)
            self._wanted, self._numels = even_slices(shapes, self._rank, self._num_ranks)
        else:
            self._held = listed_slices(heads[rank]["listed"] for rank in saved)
            is_whole = all(
                one.start + one.numel <= heads[rank]["numels"][one.flat]
                for rank, slices in enumerate(self._held)
                for one in slices
            )
            here = dict(place for _, _, place in own)
            self._wanted = listed_slices(here[rank] for rank in range(self._num_ranks))[self._rank]
            self._numels = [int(numel) for numel in self._zero.partition_size]
        covered = Counter[str]()
        for one in (one for slices in self._held for one in slices):
            covered[one.name] += one.numel
        needed = {name: numel for group in _numels(self._shapes) for name, numel in group.items()}
        for name, numel in needed.items():
            if covered[name] != numel:
                self._refuse(f"its files hold {covered[name]} elements of {name} with {numel}")
        if not is_whole:
            self._refuse("flat tensors of its files have other sizes than their parameters")

    # What DeepSpeed asks for.

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Stand in for the checkpoint engine's method of that name."""
        if path == self._files.optimizer(self._rank):
            return {keys.OPTIMIZER_STATE_DICT: self._optimizer_states()}
        return {**self._model_states(path), "dp_world_size": self._num_ranks}

    def _model_states(self, path: str) -> dict[str, Any]:
        saved, name = read_file(path), keys.FROZEN_PARAM_FRAGMENTS
        frozen = saved.pop(name, None)
        if not self._is_stage3 or frozen is None:
            return _copied({**saved, name: frozen})
        flats = [{name: numel} for name, numel in _numels([self._frozen_shapes])[0].items()]

        def read(rank: int) -> dict[str, list[Tensor]]:
            fragments = read_file(self._files.model(rank))[name]
            return {name: [fragments[key].view(-1) for one in flats for key in one]}

        held = [even_slices(flats, rank, self._saved_by)[0] for rank in range(self._saved_by)]
        wanted = even_slices(flats, self._rank, self._num_ranks)
        parts = put_together(*wanted, held, read)[name]
        names = [key for one in flats for key in one]
        return _copied(saved) | {name: dict(zip(names, parts, strict=True))}

    def _optimizer_states(self) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def read(rank: int) -> dict[str, list[Tensor]]:
            saved = read_file(self._files.optimizer(rank))[keys.OPTIMIZER_STATE_DICT]
            flats, adam = self._flats_and_adam(saved)
            states = [adam["state"][idx] for idx in sorted(adam["state"])]
            large = (keys.FP32_FLAT_GROUPS, keys.SINGLE_PARTITION_OF_FP32_GROUPS)
            large += (keys.OPTIMIZER_STATE_DICT, keys.BASE_OPTIMIZER_STATE)
            last["rest"] = _copied({key: it for key, it in saved.items() if key not in large})
            last["groups"] = _copied({"": adam["param_groups"]})[""]
            last["scalars"] = _copied(
                {key: it for state in states[:1] for key, it in state.items() if key not in _MOMENTS}
            )
            moments = {key: [state[key] for state in states] for key in _MOMENTS if states}
            return {_MASTER: flats, **moments}

        made = put_together(self._wanted, self._numels, self._held, read)
        masters = made.pop(_MASTER)
        state = {
            idx: {**last["scalars"], **{key: flats[idx] for key, flats in made.items()}}
            for idx in (range(len(masters)) if made else ())
        }
        group_of = range(len(masters))
        if self._is_stage3:
            group_of = [self._zero.sub_group_to_group_id[idx] for idx in group_of]
        groups = [
            {**group, "params": [idx for idx, of in enumerate(group_of) if of == number]}
            for number, group in enumerate(last["groups"])
        ]
        adam = {"state": state, "param_groups": groups}
        if self._is_stage3:
            own = {keys.FP32_FLAT_GROUPS: masters, keys.OPTIMIZER_STATE_DICT: adam}
        else:
            own = {keys.SINGLE_PARTITION_OF_FP32_GROUPS: masters, keys.BASE_OPTIMIZER_STATE: adam}
            own[keys.GROUP_PADDINGS] = self._zero.groups_padding
            # Releases before 0.19.8 align no single parameters.
            if hasattr(self._zero, "round_robin_bit16_padding"):
                own[keys.PARAM_ALIGNMENT_PADDINGS] = self._zero.round_robin_bit16_padding
        return last["rest"] | own


def _numels(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    return [{name: torch.Size(shape).numel() for name, shape in it.items()} for it in groups]


def _copied(saved: dict[str, Any]) -> dict[str, Any]:
    # What the caller keeps must not read a file that the next save overwrites.
    return copy.deepcopy(saved)
