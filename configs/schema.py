"""One run of the harness as data: a model, and the fields that a run of any study has.

A *point* is one run, a file of a study's ``points`` or one cell of a sweep. Nothing here starts a
process or imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from configs.errors import explain
from configs.table import NAME_PATTERN, Table
from deep_optimizer_states.predict import gpt

if TYPE_CHECKING:
    from configs.study import Engine, Study

MODEL_PREFIX = "model."
"""``model.hidden`` is one field of the model that a point names."""


class Model(Table, use_attribute_docstrings=True):  # for --help
    """A GPT of one of two architectures."""

    name: str = Field(pattern=NAME_PATTERN, max_length=40)
    """Label in log names and tables (``7B``)."""
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
        """Return the rows of the embedding, padded as Megatron does for ``tp`` ranks."""
        return gpt.padded_vocab_size(self.vocab_size, tp)

    def num_parameters(self, tp: int = 1) -> int:
        """Return the trainable parameters of the whole model, over all tensor-parallel ranks.

        Parameters that every such rank holds whole count once, and so do tied embeddings.
        """
        return gpt.num_parameters(self, tp)

    def layers_of_stages(self, pp: int) -> tuple[int, ...]:
        """Return the layers of each stage of a pipeline; see :func:`gpt.layers_of_stages`."""
        return gpt.layers_of_stages(self.layers, pp)


MODEL_FIELDS = {MODEL_PREFIX + name: field for name, field in Model.model_fields.items()}
"""Fields of a model as a point's overrides name them."""


class Point(Table, use_attribute_docstrings=True):  # for --help
    """One run: a model, an engine, and the fields that every study has.

    A study's own fields are added by :attr:`configs.study.Study.point_type`.
    """

    study: ClassVar[Study]
    """The study whose engine and fields it has; :attr:`configs.study.Study.point_type` sets it."""
    name: str = ""
    """Free label; the log's name does not depend on it."""
    model: Model
    """The model, by name or as a table."""
    engine: str = ""
    """One of the study's engines, by default its reference."""
    tp: PositiveInt = 1
    """Tensor-parallel degree, in ranks."""
    dp: PositiveInt = 1
    """Data-parallel degree, in ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel degree, in ranks."""
    link_mbit: int = Field(default=0, ge=0)
    """Mbit/s that each rank can send, and receive, over a link of its own; 0 for links as they
    are."""
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
    """Prefix of Megatron's ``.bin``/``.idx``, ``embedded`` or ``oscar-1gb``; empty for oscar-1gb
    where the model is full-size and it has been prepared, else for the embedded corpus."""
    split: str = Field(default="949,50,1", pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){2}$")
    """Shares of train, validation and test documents."""
    eval_interval: int = Field(default=0, ge=0)
    """Iterations from one evaluation on validation documents to the next, and one at the end; 0
    for none."""
    eval_iterations: PositiveInt = 10
    """Global batches of an evaluation, the same ones every time."""
    save_interval: int = Field(default=0, ge=0)
    """Iterations from one checkpoint to the next, and one at the end; 0 for none."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problem = batch_problem(self.global_batch_size, self.micro_batch_size, self.dp)
        if problem:
            raise ValueError(problem)
        for field in ("heads", "kv_heads", "ffn"):
            size = getattr(self.model, field)
            if size % self.tp:
                raise ValueError(f"the model's {field} {size} cannot be split over tp {self.tp}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        self._check_engine(self.study)
        return self

    def _check_engine(self, study: Study) -> None:
        if self.engine not in study.engines:
            raise ValueError(explain.unknown("engine", self.engine, study.engines))
        for name in study.set_by_engines:
            value, fixed = getattr(self, name), study.fixed_value(self.engine, name)
            if value != fixed:
                raise ValueError(
                    f"{name} = {value!r}: engine '{self.engine}' has {name} = {fixed!r}; leave it "
                    "out or choose another engine"
                )
        taken = study.engines[self.engine].fields
        for name, row in study.fields.items():
            value = getattr(self, name)
            if row.only_some_engines and name not in taken and value != row.default:
                takers = " or ".join(map(repr, study.takers(name)))
                raise ValueError(
                    f"{name} {value} has no meaning for engine '{self.engine}'; "
                    f"leave it out or choose engine {takers}"
                )
        for name, limits in taken.items():
            value, where = getattr(self, name), f"for engine '{self.engine}'"
            if limits.minimum is not None and value < limits.minimum:
                raise ValueError(f"{name} must be at least {limits.minimum:g} {where}")
            if limits.below is not None and value >= limits.below:
                raise ValueError(f"{name} must be below {limits.below:g} {where}")

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank sums before an update."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.tp * self.pp * self.dp

    @property
    def row(self) -> Engine:
        """The engine as its study describes it."""
        return self.study.engines[self.engine]

    def value(self, name: str) -> Any:
        """Return a field's value, be it of the study, of the model (``model.NAME``) or derived."""
        if name.startswith(MODEL_PREFIX):
            return getattr(self.model, name.removeprefix(MODEL_PREFIX))
        return self.model.name if name == "model" else getattr(self, name)

    @property
    def values(self) -> dict[str, Any]:
        """All fields but the model, as templates of a study may name them."""
        names = (name for name in type(self).model_fields if name != "model")
        return {name: getattr(self, name) for name in (*names, "accumulation", "num_ranks")}

    @property
    def log_name(self) -> str:
        """The log's file name: as the paper's script builds it, with the study's fields after it.

        What that script does not know, stages and links, is named where a run has it.

        A field of some engines alone is for the engine's own part to name, which does so where it
        has words for it, and lists those that are not at their default where it has none.
        """
        m, template = self.model, self.row.log
        stages = f"-pp{self.pp}" if self.pp > 1 else ""
        link = f"-link{self.link_mbit}" if self.link_mbit else ""
        parts = [
            f"log-{m.name}-tp{self.tp}{stages}-dp{self.dp}-l{m.layers}-h{m.hidden}-a{m.heads}"
            f"-sl{m.seq_length}-gbs{self.global_batch_size}-mbs{self.micro_batch_size}{link}"
        ]
        own = [template.format_map(self.values) or f"engine_{self.engine}"]
        for name, row in self.study.fields.items():
            value = getattr(self, name)
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            if row.log and not row.only_some_engines:
                parts.append(f"{row.log}{shown}")
            elif row.log and value != row.default and f"{{{name}}}" not in template:
                own.append(row.log if value is True else f"{row.log}{shown}")
        return "-".join([*parts, *own]) + ".log"


def batch_problem(global_batch: int, micro_batch: int, ranks: int) -> str:
    """Return why no accumulation makes a global batch of micro-batches and data-parallel ranks.

    It names the nearest global batches that would do; empty where the three fit together.
    """
    together = micro_batch * ranks
    below = global_batch // together
    if global_batch == below * together:
        return ""
    near = [f"{n * together} (accumulation {n})" for n in (below, below + 1) if n]
    return (
        f"global_batch_size {global_batch} is not a multiple of micro_batch_size {micro_batch} x "
        f"dp {ranks} = {together}; give global_batch_size {' or '.join(near)}"
    )
