"""Load a ZeRO checkpoint into any number of ranks, once all of its files are seen to be one save's.

DeepSpeed's own ``load_checkpoint`` loads. Before, the ranks look into the files together, and
refuse together what stock would find out on one rank alone, or never. If another number of ranks
saved them, DeepSpeed is given the files that this number would have saved: what it asks for is put
together, for this rank alone, from slices of the files that there are. So whatever DeepSpeed
restores is restored, by its own code.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint import constants as keys
from deepspeed.utils import logger
from torch import Tensor, distributed as dist

from deep_optimizer_states.adapter.identity import (
    MOMENTS,
    NO_MOMENTS,
    UPDATES,
    Head,
    head_of_model,
    head_of_state,
    is_archive,
    read_file,
    refuse_mixture,
)
from deep_optimizer_states.errors import CheckpointError

_MASTER = "master weights"
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
    held: Iterable[Iterable[Slice]],
    read: Callable[[int], Mapping[str, Sequence[Tensor]]],
) -> dict[str, list[Tensor]]:
    """Copy slices from the flat tensors of all files into those of one rank.

    Args:
        wanted: The rank's slices.
        numels: Elements of each of its flat tensors.
        held: The slices of each file.
        read: Opens a file: kind -> its flat tensors, each 1-D. It is asked for the first file, and
            for those that have something; one is open at a time.

    Returns:
        Kind -> new flat tensors on the CPU, 0 where nothing belongs. They have the types of those
        of the same number in the first file, or of its last.
    """
    made: dict[str, list[Tensor]] = {}
    for file, slices in enumerate(held):
        pairs = overlaps(wanted, slices)
        for kind, flats in read(file).items() if pairs or not file else ():
            made[kind] = made.get(kind) or [
                torch.zeros(numel, dtype=flats[min(flat, len(flats) - 1)].dtype, device="cpu")
                for flat, numel in enumerate(numels)
            ]
            for to, of in pairs:
                source = flats[of.flat].narrow(0, of.start, of.numel)
                made[kind][to.flat].narrow(0, to.start, to.numel).copy_(source)
    return made


@contextlib.contextmanager
def resharding(engine: Any, asked: Mapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed load, in the block, a checkpoint of any number of ranks; every rank must.

    Where the number is the engine's, DeepSpeed reads the files itself, once they were looked into.

    Args:
        engine: One of ours.
        asked: The arguments of its ``load_checkpoint``, by name.

    Raises:
        CheckpointError: The checkpoint does not fit, or its files are not all there, whole and of
            one save; on all ranks alike, before anything of the engine is changed.
    """
    folder, tag = Path(asked["load_dir"]), asked.get("tag")
    if tag is None and (folder / "latest").is_file():
        tag = (folder / "latest").read_text().strip()
    if tag is None or engine.load_universal_checkpoint():
        yield
        return
    has_moments = asked.get("load_optimizer_states", True) and not asked.get("load_module_only")
    checkpoint = _Checkpoint(engine, asked["load_dir"], tag, bool(has_moments))
    if engine.zero_optimization_stage() < 3 and not has_moments:
        checkpoint.look()  # at weights alone, of which one file has all; stock lets one rank do so
        yield
        return
    saved_by = [number for number in _together(checkpoint.look) if number is not None]
    if not saved_by:
        yield
        return
    _together(lambda: checkpoint.refuse_others(saved_by))
    shares = _together(checkpoint.read_share)
    checkpoint.refuse_mixture(shares)
    if not checkpoint.is_cut_anew:
        yield
        return
    _together(lambda: checkpoint.settle(shares))
    reader = engine.checkpoint_engine
    engine._get_all_ckpt_names = checkpoint.of_model_ranks
    reader.load = checkpoint.load
    try:
        yield
    finally:
        del engine._get_all_ckpt_names, reader.load


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
            raise CheckpointError(f"{theirs} (seen by rank {rank})")
    return [found for _, found in of_all]


class _Share(NamedTuple):
    """What one rank finds in its share of the files.

    Attributes:
        model_rank: The rank's part of the model.
        heads: Those of all files.
        layouts: Rank that saved -> elements of its flat tensors, padding included, and the padding
            behind single parameters; empty where nothing is cut anew.
        doubt: What may be wrong; empty where nothing is.
    """

    model_rank: int
    heads: list[Head]
    layouts: dict[int, tuple[list[int], Any]]
    doubt: str


class _Checkpoint:
    """A checkpoint, as this rank of this engine would have saved it.

    What it raises is a :class:`CheckpointError`.
    """

    def __init__(self, engine: Any, folder: Any, tag: Any, has_moments: bool) -> None:
        self._engine, self._folder, self._tag = engine, folder, tag
        self._zero, self._has_moments = engine.optimizer, has_moments
        self._is_stage3 = engine.zero_optimization_stage() == 3
        self._rank = dist.get_rank(group=self._zero.dp_process_group)
        self._num_ranks = int(engine.seq_dp_world_size)
        mpu = engine.mpu
        self._model_rank = 0 if mpu is None else int(mpu.get_model_parallel_rank())
        self._saved_by = 0
        self._saved_flats: list[dict[str, int]] = []
        self._layouts: dict[int, tuple[list[int], Any]] = {}

    # Its files.

    def _model_file(self, rank: int) -> str:
        return str(self._engine._get_ckpt_name(self._folder, self._tag, pp_placeholder=str(rank)))

    def of_model_ranks(self, *_asked: Any) -> list[str]:
        """Return the paths of weights and counters of each part of the model."""
        name = Path(self._engine._get_ckpt_name(self._folder, self._tag, "*", "0"))
        return sorted(map(str, name.parent.glob(name.name)))

    def _optimizer_file(self, rank: int, is_bf16: bool | None = None) -> str:
        is_bf16 = self._engine.bfloat16_enabled() if is_bf16 is None else is_bf16
        name_of = self._engine._get_rank_zero_ckpt_name
        name = str(name_of(self._folder, self._tag, self._model_rank, rank, is_bf16))
        of_old = f"{name.removesuffix('_optim_states.pt')}optim_states.pt"  # DeepSpeed takes it too
        return of_old if Path(of_old).is_file() and not Path(name).is_file() else name

    # What it holds, and whether that fits.

    def look(self) -> int | None:
        """Return how many ranks saved it; None where this rank cannot see that."""
        own = self._model_file(self._rank)
        for path in (own, self._model_file(0)):
            if Path(path).is_file():
                # Another format than torch's is DeepSpeed's to read, and a wrong key its to name.
                errors = (KeyError,) if is_archive(path) else (KeyError, CheckpointError)
                with contextlib.suppress(*errors):
                    return int(read_file(path)["dp_world_size"])
                return None
        if not self._has_moments and self._engine._get_all_ckpt_names(self._folder, self._tag):
            return None  # DeepSpeed cuts or joins weights of other model parallel sizes
        size = self._engine.mp_world_size
        for other in sorted(Path(own).parent.glob("*model_states.pt")):
            saved, is_of_stage3 = read_file(str(other)), other.name.startswith("zero_pp_rank_")
            if is_of_stage3 == self._is_stage3 and saved.get("mp_world_size", size) == size:
                break
            config = saved.get("ds_config")  # or the path of one
            stage = config["zero_optimization"]["stage"] if isinstance(config, dict) else ""
            raise CheckpointError(
                f"{other} was saved at zero_optimization.stage = "
                f"{stage or ('3' if is_of_stage3 else '1 or 2')}, and this engine has "
                f"{self._engine.zero_optimization_stage()} and asks for {Path(own).name}: set the "
                "same stage and parallel sizes"
            )
        read_file(self._model_file(0))
        return None

    @property
    def is_cut_anew(self) -> bool:
        """Return whether another number of ranks saved it."""
        return self._saved_by != self._num_ranks

    def refuse_others(self, saved_by: Sequence[int]) -> None:
        """Refuse what cannot be cut anew, and another model, by what differs.

        Args:
            saved_by: What each rank's :meth:`look` found.
        """
        self._saved_by = saved_by[0]
        if not self.is_cut_anew:
            return
        engine, saved = self._engine, read_file(self._model_file(0))
        size, own = saved.get("mp_world_size"), engine.mp_world_size
        self._refuse_if(size != own, f"model parallel size {size}, here {own}: set the same")
        self._refuse_if(engine.has_moe_layers, "experts, which lie on ranks of their own")
        self._refuse_if(saved.get("module") is None, "parts of a PipelineModule")
        shapes, frozen = saved.get(keys.PARAM_SHAPES, []), saved.get(keys.FROZEN_PARAM_SHAPES)
        self._refuse_if(not shapes, f"no {keys.PARAM_SHAPES}, the sizes of parameters")
        if engine.zero_elastic_checkpoint():
            raise CheckpointError(f"elastic_checkpoint = true: set it to false; or {_WAY_OUT}")
        self._refuse_other_model(engine._get_zero_param_shapes(), shapes)
        if self._is_stage3 and frozen:
            self._refuse_other_model([self._frozen_shapes], [frozen])
        self._saved_flats = _numels(shapes)

    @property
    def _frozen_shapes(self) -> dict[str, Any]:
        engine = self._engine
        return dict(engine._get_zero_frozen_param_attributes(engine._get_param_shape_func))

    def _refuse_other_model(self, here: Any, saved: Any) -> None:
        of_here, of_saved = [
            {name: tuple(shape) for group in groups for name, shape in group.items()}
            for groups in (here, saved)
        ]
        for name in {**of_saved, **of_here}:
            shape, own = of_saved.get(name, "none"), of_here.get(name, "none")
            text = f"another model: parameter {name} of shape {shape}, here {own}"
            self._refuse_if(shape != own, text)

    def _refuse_if(self, is_wrong: Any, what: str) -> None:
        if is_wrong:
            ranks = f"{self._saved_by} ranks, which {self._num_ranks} are to load"
            raise CheckpointError(f"{self._model_file(0)} of {ranks}, has {what}; or {_WAY_OUT}")

    def read_share(self) -> _Share:
        """Look into this rank's share of the files, so that all together look into each once."""
        is_bf16 = self._engine.bfloat16_enabled()
        share = _Share(self._model_rank, [], {}, "")
        for rank in range(self._rank, self._saved_by, self._num_ranks):
            paths = [self._model_file(rank), self._optimizer_file(rank)][: 1 + self._has_moments]
            if not self.is_cut_anew and not all(map(is_archive, paths)):
                continue
            other = self._optimizer_file(rank, not is_bf16)
            if not Path(paths[-1]).is_file() and Path(other).is_file():
                raise CheckpointError(
                    f"{other} was saved with bf16.enabled = {str(not is_bf16).lower()}, and this "
                    f"engine has {str(is_bf16).lower()}: set the same"
                )
            model, *states = map(read_file, paths)
            share.heads.append(head_of_model(paths[0], model))
            for state in states:
                if self.is_cut_anew:
                    share.layouts[rank] = self._layout_of(rank, state)
                share.heads.append(head_of_state(paths[1], state, _adam_states(state)))
                share = share._replace(doubt=share.doubt or self._doubt(rank, model, state, share))
        return share

    def _doubt(self, rank: int, model: Any, state: Any, share: _Share) -> str:
        """Tell that weights and state count different updates; refuse weights of another step.

        A caller may have set the counters, or have loaded them without moments, so that the numbers
        alone prove nothing. Below stage 3 the weights do.
        """
        of_model, of_state = share.heads[-2:]
        updates = model.get("global_steps", 0) - model.get("skipped_steps", 0)
        said = of_state.counters[UPDATES]
        if of_state.identity or said in (str(updates), NO_MOMENTS):
            return ""
        told = (
            f"{of_model.path} counts {updates} updates (global_steps less skipped_steps), and "
            f"{of_state.path} those of Adam: {said}"
        )
        masters, adam = self._flats_and_adam(state[keys.OPTIMIZER_STATE_DICT])
        if self._is_stage3 or self._engine.has_moe_layers or isinstance(adam, list):
            return f"{told}. If nobody set the counters, the files are of different saves"
        flats, weights = _numels(model[keys.PARAM_SHAPES] or []), model["module"] or {}
        slices: list[Slice] = []
        if flats:
            numels, paddings = self._layout_of(rank, state)
            slices = group_slices(flats, rank, numels, paddings)
        for one in slices:
            weight = weights.get(one.name, masters[one.flat].new_empty(0)).reshape(-1)
            part = weight[one.first : one.first + one.numel]
            master = masters[one.flat].narrow(0, one.start, one.numel).to(weight.dtype)
            if part.numel() and not torch.equal(part, master):
                raise CheckpointError(
                    f"{told}; {one.name} is not the same in both: the files are of different "
                    "saves; load another checkpoint"
                )
        return ""

    def refuse_mixture(self, shares: Sequence[_Share]) -> None:
        """Refuse files of more than one save; on all ranks alike, since each has all shares.

        Args:
            shares: Every rank's :meth:`read_share`.
        """
        heads = [head for share in shares for head in share.heads]
        refuse_mixture(heads)
        doubts = [share.doubt for share in shares if share.doubt]
        if doubts and dist.get_rank() == 0:
            logger.warning(f"deep_optimizer_states: {doubts[0]}")
        states = [head for head in heads if UPDATES in head.counters]
        if not states or states[0].identity or states[0].counters[UPDATES] != NO_MOMENTS:
            return
        counters = heads[0].counters
        updates = counters.get("global_steps", 0) - counters.get("skipped_steps", 0)
        # Stock takes it, and so it is taken where stock loads.
        if self.is_cut_anew and updates:
            raise CheckpointError(
                f"{states[0].path} has no moments after {updates} updates: load another "
                "checkpoint, or weights alone with load_optimizer_states=False"
            )

    def _layout_of(self, rank: int, content: Mapping[str, Any]) -> tuple[list[int], Any]:
        path = self._optimizer_file(rank)
        at = f"in {Path(path).name}"
        try:
            saved = content[keys.OPTIMIZER_STATE_DICT]
            flats, adam = self._flats_and_adam(saved)
            self._refuse_if(isinstance(adam, list), f"{at} elastic_checkpoint = true")
            states, num_groups = list(adam["state"].values()), len(adam["param_groups"])
            padding = [0] * len(flats) if self._is_stage3 else saved[keys.GROUP_PADDINGS]
            numels = [flat.numel() + more for flat, more in zip(flats, padding, strict=True)]
            moments = [[state[key].numel() for state in states] for key in MOMENTS if states]
            counts = saved[keys.PARTITION_COUNT]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} does not hold {error}; {_WAY_OUT}") from error
        steps = {int(state.get("step", 0)) for state in states}
        is_of_all = set(counts if isinstance(counts, list) else [counts]) == {self._saved_by}
        own = len(self._zero.optimizer.param_groups)
        self._refuse_if(not is_of_all, f"{at} {keys.PARTITION_COUNT} = {counts}")
        self._refuse_if(len(steps) > 1, f"{at} different numbers of updates, {sorted(steps)}")
        self._refuse_if(num_groups != own, f"{at} {num_groups} parameter groups, here {own}")
        text = f"{at} moments of {moments} elements, not {numels}"
        self._refuse_if(any(of != numels for of in moments), text)
        return numels, saved.get(_ALIGNED)

    def _flats_and_adam(self, saved: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        if self._is_stage3:
            return saved[keys.FP32_FLAT_GROUPS], saved[keys.OPTIMIZER_STATE_DICT]
        return saved[keys.SINGLE_PARTITION_OF_FP32_GROUPS], saved[keys.BASE_OPTIMIZER_STATE]

    def settle(self, shares: Sequence[_Share]) -> None:
        """Settle where each slice of state lies; every element of every parameter must be there.

        Args:
            shares: Every rank's :meth:`read_share`.
        """
        for share in shares:
            self._layouts |= share.layouts if share.model_rank == self._model_rank else {}
        held = 0
        for rank in range(self._saved_by if self._has_moments else 0):
            numels, expected = self._layouts[rank][0], self._layouts[0][0]
            if self._is_stage3:
                _, expected = even_slices(self._saved_flats, rank, self._saved_by)
            text = f"flat tensors of {numels} elements on rank {rank}, not {expected}"
            self._refuse_if(numels != expected, text)
            held += sum(one.numel for one in self._slices_of(rank))
        needed = sum(numel for flat in self._saved_flats for numel in flat.values())
        text = f"{held} elements of state for {needed} of parameters"
        self._refuse_if(self._has_moments and held != needed, text)

    def _slices_of(self, rank: int) -> list[Slice]:
        if self._is_stage3:
            return even_slices(self._saved_flats, rank, self._saved_by)[0]
        return group_slices(self._saved_flats, rank, *self._layouts[rank])

    # What DeepSpeed asks for.

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Stand in for the checkpoint engine's method of that name."""
        if path == self._optimizer_file(self._rank):
            return {keys.OPTIMIZER_STATE_DICT: self._optimizer_states()}
        saved = read_file(path)
        if self._is_stage3 and saved.get(keys.FROZEN_PARAM_FRAGMENTS):
            saved[keys.FROZEN_PARAM_FRAGMENTS] = self._frozen_fragments()
        # What the caller keeps must not read a file that the next save overwrites.
        return copy.deepcopy({**saved, "dp_world_size": self._num_ranks})

    def _frozen_fragments(self) -> dict[str, Tensor]:
        kind, of_name = keys.FROZEN_PARAM_FRAGMENTS, _numels([self._frozen_shapes])[0]
        flats = [{name: numel} for name, numel in of_name.items()]

        def read(rank: int) -> dict[str, list[Tensor]]:
            fragments = read_file(self._model_file(rank))[kind]
            return {kind: [fragments[name].view(-1) for name in of_name]}

        held = (even_slices(flats, rank, self._saved_by)[0] for rank in range(self._saved_by))
        wanted, numels = even_slices(flats, self._rank, self._num_ranks)
        return dict(zip(of_name, put_together(wanted, numels, held, read)[kind], strict=True))

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
            saved = read_file(self._optimizer_file(rank))[keys.OPTIMIZER_STATE_DICT]
            masters, adam = self._flats_and_adam(saved)
            states = [adam["state"][idx] for idx in sorted(adam["state"])]
            if not rest:
                first = states[0] if states else {}
                counters = {key: it for key, it in first.items() if key not in MOMENTS}
                other = {key: it for key, it in saved.items() if not (it is masters or it is adam)}
                rest.extend(copy.deepcopy((other, counters, adam["param_groups"])))
            moments = {key: [state[key] for state in states] for key in MOMENTS if states}
            return {_MASTER: masters, **moments}

        held = map(self._slices_of, range(self._saved_by))
        moments = put_together(wanted, numels, held, read)
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


def _adam_states(content: Mapping[str, Any]) -> list[Any]:
    """Return Adam's state of each flat tensor, whatever the stage."""
    saved = content.get(keys.OPTIMIZER_STATE_DICT) or {}
    adam = saved.get(keys.BASE_OPTIMIZER_STATE, saved.get(keys.OPTIMIZER_STATE_DICT, {}))
    return adam if isinstance(adam, list) else [*adam.get("state", {}).values()]


def _numels(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    return [{name: torch.Size(shape).numel() for name, shape in it.items()} for it in groups]
