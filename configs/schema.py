"""One run of the harness as data: the model, the engine mode and every knob of the paper.

A *model* is a file of ``configs/models``; a *point* is one run, a file of ``configs/points`` or one
cell of a sweep. Nothing here starts a process or imports torch.
"""

from __future__ import annotations

import enum
import math
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from configs.errors import ConfigError, explain

CONFIGS_DIR = Path(__file__).resolve().parent
PAPER_KEYS = ("prefetch_optimizer", "part_grads_async", "prefetch_optimizer_gap")
"""The engine mode in the paper's DeepSpeed config."""
VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this, times the tensor-parallel degree."""


class Engine(enum.StrEnum):
    """Who updates the optimizer state, and how gradients reach the host."""

    VANILLA = "vanilla"
    """Stock DeepSpeed ZeRO-3 with the optimizer offloaded to the host."""
    ASYNC_GRADIENTS = "async-gradients"
    """The plugin with every subgroup on the CPU: only the gradient flush is asynchronous."""
    HYBRID = "hybrid"
    """The plugin with one subgroup in ``stride`` updated on the GPU."""

    @property
    def label(self) -> str:
        """The mode's name in tables and figures."""
        return _ENGINE_LABELS[self]


_ENGINE_LABELS = {
    Engine.VANILLA: "ZeRO-3 offload",
    Engine.ASYNC_GRADIENTS: "asynchronous gradients",
    Engine.HYBRID: "hybrid",
}
_ENGINE_ALIASES = {
    "v": Engine.VANILLA,
    "zero3-offload": Engine.VANILLA,
    "a": Engine.ASYNC_GRADIENTS,
    "asynchronous-gradients": Engine.ASYNC_GRADIENTS,
    "h": Engine.HYBRID,
    "interleaved": Engine.HYBRID,
    "deep-optimizer-states": Engine.HYBRID,
}


def engine_by_any_name(value: object) -> object:
    """Canonical name of an engine mode given by any of its names; other values pass through."""
    if not isinstance(value, str):
        return value
    key = value.strip().lower().replace("_", "-").replace(" ", "-")
    return _ENGINE_ALIASES.get(key, key)


class _Table(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class Model(_Table):
    """A GPT of one of two architectures."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=40)
    """Label in log names and tables, as the paper writes it (``7B``)."""
    hidden: PositiveInt
    """Hidden size."""
    ffn: PositiveInt
    """Inner size of the feed-forward block."""
    layers: PositiveInt
    """Transformer layers."""
    heads: PositiveInt
    """Attention heads."""
    kv_heads: PositiveInt
    """Key-value heads (grouped-query attention)."""
    seq_length: PositiveInt = 2048
    """Tokens a sample."""
    vocab_size: PositiveInt = 50257
    """Tokens of the vocabulary, before padding (GPT-2's by default)."""
    architecture: Literal["llama", "gpt2"] = "llama"
    """``llama``: RMSNorm, SwiGLU, rotary positions, untied embeddings, no bias; ``gpt2``:
    LayerNorm, GELU, learned positions, tied embeddings, biases."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self

    def padded_vocab_size(self, tp: int = 1) -> int:
        """Vocabulary rows of the embedding, padded as Megatron does for ``tp`` ranks."""
        multiple = VOCABULARY_MULTIPLE * tp
        return math.ceil(self.vocab_size / multiple) * multiple

    def num_parameters(self, tp: int = 1) -> int:
        """Trainable parameters of the whole model, summed over the tensor-parallel ranks.

        Parameters that every such rank holds whole count once, and so do tied embeddings.
        """
        kv_rows = 2 * self.kv_heads * (self.hidden // self.heads)
        attention = (2 * self.hidden + kv_rows) * self.hidden
        embedding = self.padded_vocab_size(tp) * self.hidden
        if self.architecture == "llama":
            layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
            return 2 * embedding + self.layers * layer + self.hidden
        biases = 2 * self.hidden + kv_rows + self.ffn + self.hidden
        norm = 2 * self.hidden
        layer = attention + 2 * self.hidden * self.ffn + biases + 2 * norm
        return embedding + self.seq_length * self.hidden + self.layers * layer + norm


class Defaults(_Table):
    """What the paper runs a model with, unless a point says otherwise."""

    micro_batch_size: PositiveInt = 1
    """Samples a rank handles in one forward."""
    global_batch_size: PositiveInt = 1
    """Samples an iteration."""
    subgroup_numel: PositiveInt = 100_000_000
    """DeepSpeed's ``sub_group_size``, in elements."""
    dp: PositiveInt = 1
    """Data-parallel ranks."""
    iterations: PositiveInt = 10
    """Iterations of a run."""


class Point(_Table):
    """One run: a model, an engine mode and the knobs of the paper."""

    name: str = ""
    """Free label; the log's name does not depend on it."""
    model: Model
    """The model, by name or as a table."""
    engine: Annotated[Engine, BeforeValidator(engine_by_any_name)] = Engine.VANILLA
    """``vanilla``, ``async-gradients`` or ``hybrid``."""
    stride: int = Field(default=0, ge=0)
    """One subgroup in ``stride`` is updated on the GPU; for ``hybrid`` alone, at least 1."""
    offload_ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the optimizer state in host memory, from 0 to 1 (DeepSpeed's ``ratio``)."""
    subgroup_numel: PositiveInt = 100_000_000
    """Elements after which DeepSpeed closes a subgroup (``sub_group_size``)."""
    tp: PositiveInt = 1
    """Tensor-parallel degree, in ranks."""
    dp: PositiveInt = 1
    """Data-parallel degree, in ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel degree, in ranks."""
    micro_batch_size: PositiveInt = 1
    """Samples a rank handles in one forward."""
    global_batch_size: PositiveInt = 1
    """Samples an iteration: micro-batch times DP times accumulation."""
    iterations: PositiveInt = 10
    """Iterations to run."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seed of the weights and of the order of samples."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=3e-5, ge=0)
    """Learning rate at the end of the cosine."""
    lr_warmup_iterations: int = Field(default=1, ge=0)
    """Iterations of linear warm-up before the cosine."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator of Adam."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of weights and activations; ``fp16`` with DeepSpeed's dynamic loss scale."""
    grad_accum_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type in which a ``bf16`` model's micro-batches' gradients are summed; other models sum
    theirs in their own."""
    zero_stage: int = Field(default=3, ge=0, le=3)
    """DeepSpeed's ZeRO stage: what the data-parallel ranks share out."""
    offload_optimizer: Literal["cpu", "none"] = "cpu"
    """Where optimizer state lives and is updated: host memory, or the device (``none``)."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where ZeRO-3's partitions of the weights live: the device (``none``), or host memory."""
    activation_checkpointing: bool = True
    """Recompute every layer's activations in backward."""
    attention: Literal["local", "sdpa"] = "local"
    """``local`` materialises the scores, as the paper's flags do; ``sdpa`` does not."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; ``auto`` takes CUDA when there is one."""
    data_prefix: str = ""
    """Prefix of Megatron's ``.bin``/``.idx``; empty for the embedded default corpus."""
    hog_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of each device's time that a co-process takes (GPU hogging), from 0 to below 1."""
    split: str = Field(default="949,50,1", pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){2}$")
    """Shares of train, validation and test documents."""
    eval_interval: int = Field(default=0, ge=0)
    """Iterations from one evaluation on validation documents to the next; 0 for none."""
    eval_iterations: PositiveInt = 10
    """Global batches of an evaluation, the same ones every time."""
    save_interval: int = Field(default=0, ge=0)
    """Iterations from one checkpoint to the next; 0 for none."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        samples = self.micro_batch_size * self.dp
        if self.global_batch_size % samples:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size} x dp {self.dp}"
            )
        if self.engine is Engine.HYBRID and self.stride < 1:
            raise ValueError("stride must be at least 1 for engine 'hybrid'")
        if self.engine is not Engine.HYBRID and self.stride:
            raise ValueError(
                f"stride {self.stride} has no meaning for engine '{self.engine}'; "
                "leave it out or choose engine 'hybrid'"
            )
        for field in ("heads", "kv_heads", "ffn"):
            size = getattr(self.model, field)
            if size % self.tp:
                raise ValueError(f"the model's {field} {size} cannot be split over tp {self.tp}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank sums before an update."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.tp * self.pp * self.dp

    @cached_property
    def paper_knobs(self) -> dict[str, int]:
        """The engine mode in the paper's keys: ``prefetch``, ``flush_async``, ``opt_gaps``."""
        return {
            "prefetch": int(self.engine is Engine.HYBRID),
            "flush_async": int(self.engine is not Engine.VANILLA),
            "opt_gaps": self.stride,
        }

    @property
    def log_name(self) -> str:
        """The log's file name, as the paper's script builds it."""
        m, knobs = self.model, self.paper_knobs
        ratio = f"{self.offload_ratio:g}"
        return (
            f"log-{m.name}-tp{self.tp}-dp{self.dp}-l{m.layers}-h{m.hidden}-a{m.heads}"
            f"-sl{m.seq_length}-gbs{self.global_batch_size}-mbs{self.micro_batch_size}"
            f"-ratio{ratio}-subg{self.subgroup_numel}-prefetch{knobs['prefetch']}"
            f"-flush_async{knobs['flush_async']}-opt_gaps{knobs['opt_gaps']}.log"
        )


def engine_from_paper_knobs(prefetch: int, flush_async: int, opt_gaps: int) -> tuple[Engine, int]:
    """Engine mode and stride that the paper's three keys ask for.

    The paper's vanilla logs carry left-over gaps (``prefetch0 ... opt_gaps5``): without prefetch
    the gap has no effect.

    Raises:
        ConfigError: a switch is neither 0 nor 1, or prefetch is on with a gap below 1.
    """
    for field, value in (("prefetch", prefetch), ("flush_async", flush_async)):
        if value not in (0, 1):
            raise ConfigError(f"{field} = {value!r}: give 0 (off) or 1 (on)")
    if not prefetch:
        return (Engine.ASYNC_GRADIENTS if flush_async else Engine.VANILLA), 0
    if opt_gaps < 1:
        raise ConfigError(f"opt_gaps = {opt_gaps}: with prefetch 1 the stride must be at least 1")
    return Engine.HYBRID, opt_gaps


def model_names() -> list[str]:
    """Names of the shipped models, smallest first."""
    models = (load_model(path.stem) for path in (CONFIGS_DIR / "models").glob("*.toml"))
    return [m.name for m, _ in sorted(models, key=lambda pair: pair[0].num_parameters())]


def load_model(name: str) -> tuple[Model, Defaults]:
    """Read ``configs/models/NAME.toml``.

    Raises:
        ConfigError: no such model (the nearest is named), or a field is wrong.
    """
    known = {path.stem: path for path in (CONFIGS_DIR / "models").glob("*.toml")}
    if name not in known:
        raise ConfigError(explain.unknown("model", name, sorted(known)))
    path = known[name]
    table = read_toml(path)
    defaults = table.pop("defaults", {})
    try:
        return Model(**table), Defaults(**defaults)
    except ValidationError as error:
        raise ConfigError(explain.validation(error, source=str(path))) from None


def make_point(table: dict[str, Any], source: str = "point") -> Point:
    """Build a point from a table of fields, the model's defaults filling what it leaves out.

    ``model`` is the name of a shipped model or a table of its fields. The engine may be given by
    name, or by the paper's keys ``prefetch_optimizer``, ``part_grads_async`` and
    ``prefetch_optimizer_gap``. ``accumulation``, micro-batches a rank sums before an update, may
    stand for ``global_batch_size``.

    Raises:
        ConfigError: a field is unknown or wrong; names field, value and remedy.
    """
    fields = dict(table)
    if "accumulation" in fields and "global_batch_size" in fields:
        raise ConfigError(f"{source}: give accumulation or global_batch_size, not both")
    model = fields.get("model")
    if isinstance(model, str | int | float):
        loaded, defaults = load_model(str(model))
        fields = {**defaults.model_dump(), **fields, "model": loaded}
    elif model is None:
        raise ConfigError(f"{source}: field 'model' is missing; give the name of a model")
    given = {key: fields.pop(key) for key in PAPER_KEYS if key in fields}
    if given:
        if "engine" in fields or "stride" in fields:
            raise ConfigError(
                f"{source}: give the engine by name (engine, stride) or by the paper's keys "
                f"({', '.join(given)}), not both"
            )
        knobs = [_whole_number(key, given.get(key, 0), source) for key in PAPER_KEYS]
        fields["engine"], fields["stride"] = engine_from_paper_knobs(*knobs)
    if "accumulation" in fields:
        names = ("accumulation", "micro_batch_size", "dp")
        factors = [_whole_number(name, fields.get(name, 1), source) for name in names]
        if factors[0] < 1:
            raise ConfigError(f"{source}: accumulation = {factors[0]}: give 1 or more")
        fields["global_batch_size"] = math.prod(factors)
        del fields["accumulation"]
    try:
        return Point(**fields)
    except ValidationError as error:
        raise ConfigError(explain.validation(error, source=source, model=Point)) from None


def _whole_number(key: str, value: str | float, source: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: {key} = {value!r}: give a whole number") from None


def load_point(path: Path) -> Point:
    """Read one point from a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or a field is wrong.
    """
    return make_point(read_toml(path), source=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing or is not TOML; the line is named.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
