"""The ``"deep_optimizer_states"`` block of a DeepSpeed config, and the paper's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.toml_io import Words, explain

BLOCK = "deep_optimizer_states"
"""Name of the top-level block."""

STEP_BEFORE_NORM = f"{BLOCK}.step_before_norm"
DEVICE_MEMORY = f"{BLOCK}.device_memory_bytes"

PAPER_KEYS = ("prefetch_optimizer", "part_grads_async", "prefetch_optimizer_gap")
"""Keys under ``zero_optimization.offload_optimizer`` of configs written for the paper's fork."""

_DEVICE_MEMORY_STANDS = (
    '"device_memory_bytes" stands for it, a limit of all device memory that state and gradients '
    'may take; "auto" is the default'
)
GONE = {
    "machine": 'policy "auto", the default, measures while it trains and reads no profile',
    "prefetch_memory_bytes": _DEVICE_MEMORY_STANDS,
    "keep_grads_on_device": _DEVICE_MEMORY_STANDS,
}
"""Keys of earlier releases, to what stands for them; each is to be left out."""


def _in_one_sentence(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:  # it has a sentence for each kind of value that there might be
        raise ValueError('give a whole number of bytes, at least 0, or "auto"') from None


Bytes = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=0, strict=True)], WrapValidator(_in_one_sentence)
]
Policy = Literal["all-host", "ratio", "stride", "all-device", "dynamic", "auto"]

DEFAULT_TILE_NUMEL = 2**25
"""32 Mi elements: large enough that issuing a tile costs nothing, small enough for three slots."""


class Settings(BaseModel):
    """The block, checked.

    Example::

        {"deep_optimizer_states": {"enabled": true}}
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    """Switch the plugin on; without it DeepSpeed stays as it is."""
    policy: Policy = "auto"
    """Which subgroups the GPU updates: ``all-host`` none, ``ratio`` those that live there,
    ``stride`` one in ``stride``, ``all-device`` all, ``dynamic`` as many as it can, measured while
    the update runs, ``auto`` as ``dynamic`` or ``all-host``, whichever makes shorter iterations,
    measured while it trains; without a GPU as ``all-host``. No result depends on it."""
    stride: int = Field(default=2, ge=1)
    """For policy ``stride``, at least 1: subgroup i is updated on the GPU if (i + 1) is a multiple
    of it."""
    ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the optimizer state in host memory, from 0 to 1. The rest lives on the GPU: as many
    of the first subgroups as fit into it. It combines with any policy; policy ``ratio`` needs it
    below 1. Left out under ``auto`` and ``dynamic`` at stage 3: as much as host memory holds."""
    just_in_time_forward: bool = True
    """Return from ``step()`` once the update is launched, and let whoever uses a parameter wait for
    its own tiles; at stages 1 and 2 on one rank alone, and without a GPU under ``auto`` only if it
    is given. No result depends on it."""
    tile_numel: int = Field(default=DEFAULT_TILE_NUMEL, ge=16, multiple_of=16)
    """Largest piece of a subgroup that is updated at once, in elements, a multiple of 16. No result
    depends on it."""
    step_before_norm: bool = False
    """Update a tile during backward, once its gradients are final. Stage 3 only, in bf16 or fp32,
    with ``gradient_clipping`` 0, so that no norm is needed. No result depends on it, but a gradient
    that is not finite ends in an error instead of a skipped step."""
    device_memory_bytes: Bytes = "auto"
    """Device memory of a rank in which optimizer state may stay from step to step, its gradients
    beside it, in bytes; ``auto``: what forward and backward leave free, given back when others need
    it; 0: none. No result depends on it."""
    host_memory_bytes: int = Field(default=0, ge=0)
    """Host memory that all ranks of a machine may take together, in bytes, for a machine that has
    more than it shows; 0: the memory that the system reports as free. State that needs more lives
    on the GPU, see ``ratio``, or is refused."""
    checkpoint: Literal["blocking", "background"] = "blocking"
    """``background``: ``save_checkpoint`` returns at once, and its files are filled while training
    goes on. The files are the same; ``latest`` names them once they are whole."""
    checkpoint_memory_bytes: Bytes = "auto"
    """Host memory of a rank in which a background checkpoint may keep copies of state that an
    update is about to overwrite, in bytes; ``auto``: half of its share of the memory that stayed
    free at the peak of training so far."""
    raise_on_failed_checkpoint: bool = False
    """Raise a failed background checkpoint at the next ``step()`` or save, instead of only
    warning."""
    verify_every: int = Field(default=1000, ge=0)
    """Repeat updates 1 and 2, and one in this many, on the CPU for a sample of every tile, and
    compare the bits; ``step()`` waits for those updates. 0: none. No result depends on it."""

    @model_validator(mode="after")
    def _ratio_has_a_meaning(self) -> Self:
        if self.policy == "ratio" and self.ratio == 1.0:
            raise ValueError('policy "ratio" needs "ratio" below 1: the share kept in host memory')
        return self

    @model_validator(mode="after")
    def _stride_has_a_policy(self) -> Self:
        if "stride" in self.model_fields_set and "policy" not in self.model_fields_set:
            raise ValueError(
                f'"stride" = {self.stride} needs "policy" "stride", which is no longer the '
                'default; give both, or leave "stride" out and let policy "auto" measure'
            )
        return self


def read_settings(ds_config: Mapping[str, Any]) -> Settings:
    """Return the settings that a DeepSpeed config asks for; disabled without a block of ours.

    Raises:
        ConfigError: an unknown key (the nearest valid one is named) or a wrong value.
    """
    block = ds_config.get(BLOCK)
    if block is None:
        return Settings()
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{BLOCK}" = {block!r}: give a table such as {{"enabled": true}}')
    for key, instead in GONE.items():
        if key in block:
            raise ConfigError(f'"{BLOCK}.{key}" = {block[key]!r}: leave it out; {instead}')
    try:
        return Settings(**block)
    except ValidationError as error:
        words = Words(prefix=f"{BLOCK}.", quote='"', field='"{}"')
        raise ConfigError(explain(error, Settings.model_fields, words)) from None


def translate_paper_keys(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``ds_config`` in which the paper's keys have become our block.

    ``prefetch_optimizer`` 1 asks for the hybrid update, one subgroup in ``prefetch_optimizer_gap``
    on the GPU; ``part_grads_async`` 1 without it for asynchronous gradients alone (policy
    ``all-host``); both 0 for stock DeepSpeed. Gradients are flushed asynchronously under every
    policy, since that changes no result.

    Raises:
        ConfigError: a key has a value it cannot have, or the config also holds our block.
    """
    result = dict(ds_config)
    zero = result.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return result
    offload = zero.get("offload_optimizer")
    if not isinstance(offload, Mapping):
        return result
    given = {key: offload[key] for key in PAPER_KEYS if key in offload}
    if not given:
        return result
    if BLOCK in result:
        raise ConfigError(
            f'the config holds both "{BLOCK}" and zero_optimization.offload_optimizer.'
            f"{{{', '.join(given)}}}; keep one of them"
        )
    kept = {key: value for key, value in offload.items() if key not in PAPER_KEYS}
    result["zero_optimization"] = {**zero, "offload_optimizer": kept}  # `kept` may lose its ratio
    block = _block_from_paper_keys(given)
    if block is not None:
        if kept.get("ratio", 1) != 1:
            # The paper's TwinFlow share, which stock would update with an optimizer of its own.
            block["ratio"] = kept.pop("ratio")
        result[BLOCK] = block
    return result


def _block_from_paper_keys(given: Mapping[str, Any]) -> dict[str, Any] | None:
    for key in ("prefetch_optimizer", "part_grads_async"):
        if given.get(key, 0) not in (0, 1):
            raise ConfigError(f"offload_optimizer.{key} = {given[key]!r}: give 0 (off) or 1 (on)")
    if given.get("prefetch_optimizer", 0):
        gap = given.get("prefetch_optimizer_gap")
        if not isinstance(gap, int) or isinstance(gap, bool) or gap < 1:
            raise ConfigError(
                f"offload_optimizer.prefetch_optimizer_gap = {gap!r}: with prefetch_optimizer 1 "
                "give the stride, a whole number of at least 1"
            )
        return {"enabled": True, "policy": "stride", "stride": gap}
    if given.get("part_grads_async", 0):
        return {"enabled": True, "policy": "all-host"}
    return None
