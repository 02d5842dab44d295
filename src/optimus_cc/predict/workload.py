"""What an iteration has to compute and to send: a GPT-2, cut into stages and shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from optimus_cc.settings import Settings
from optimus_cc.sizes import matrix_shape, pair_numel, saves

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this, times the tensor-parallel degree."""
Shape = tuple[int, ...]


class PredictionError(ValueError):
    """Something cannot be predicted; the message says what to do instead."""


@dataclass(frozen=True)
class Model:
    """A GPT-2: LayerNorm, biases, learned positions, the output layer tied to the embedding."""

    name: str
    hidden: int
    layers: int
    heads: int
    ffn: int
    seq_length: int = 1024
    vocab_size: int = 50257
    kv_heads: int = 0
    """Key-value heads, where they are fewer than ``heads``."""

    @property
    def query_key_value(self) -> int:
        """Rows of the projection to queries, keys and values."""
        kv_heads = self.kv_heads or self.heads
        return self.hidden + 2 * kv_heads * (self.hidden // self.heads)


@dataclass(frozen=True)
class Workload:
    """An iteration of a model on stages x replicas x shards, forward and backward in 1F1B."""

    model: Model
    pp: int
    dp: int
    tp: int
    micro_batch_size: int
    num_micro_batches: int
    """Of each replica, an iteration."""
    element_bytes: int
    """Of activations and gradients."""
    recomputes: bool = False
    """Whether backward computes every layer's activations once more."""

    def __post_init__(self) -> None:
        if self.pp < 2:
            raise PredictionError(
                f"pp = {self.pp}: predictions are of a pipeline; give two stages or more"
            )
        if self.model.layers < self.pp:
            raise PredictionError(
                f"pp = {self.pp}: a stage needs a layer, and the model has {self.model.layers}; "
                "give a smaller pp"
            )

    @cached_property
    def layers_of_stages(self) -> tuple[int, ...]:
        """Layers of each stage, as the trainer ``megatron-pipeline`` cuts them."""
        even, more = divmod(self.model.layers, self.pp)
        order = [*range(1, self.pp - 1), 0, self.pp - 1]
        return tuple(even + (stage in order[:more]) for stage in range(self.pp))

    @property
    def message_shape(self) -> Shape:
        """Of an activation, and of its gradient."""
        return self.model.seq_length, self.micro_batch_size, self.model.hidden

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.model.seq_length * self.micro_batch_size

    def message_bytes(self) -> int:
        """Of an activation or a whole gradient."""
        return math.prod(self.message_shape) * self.element_bytes

    def gradient_message(self, settings: Settings, in_epilogue: bool) -> tuple[int, bool]:
        """Bytes of an activation gradient's message, and whether it is compressed.

        The same rule as that of :class:`optimus_cc.backpropagation.BackwardCompressor`.
        """
        rank = settings.inter_grad_comp_rank
        if settings.compresses_message(in_epilogue) and saves(self.message_shape, rank):
            rows, columns = matrix_shape(self.message_shape)
            return pair_numel(rows, columns, rank) * self.element_bytes, True
        return self.message_bytes(), False

    @cached_property
    def embedding(self) -> Shape:
        """A rank's shard of the tied embedding."""
        multiple = VOCABULARY_MULTIPLE * self.tp
        padded = math.ceil(self.model.vocab_size / multiple) * multiple
        return padded // self.tp, self.model.hidden

    def parameters(self, stage: int) -> list[Shape]:
        """Shapes of a rank's parameters, the tied embedding left out."""
        model, tp = self.model, self.tp
        hidden, ffn, projection = model.hidden, model.ffn, model.query_key_value
        layer = [
            (hidden,), (hidden,), (hidden,), (hidden,),  # two norms
            (hidden, hidden // tp), (hidden,), (projection // tp, hidden), (projection // tp,),
            (ffn // tp, hidden), (ffn // tp,), (hidden, ffn // tp), (hidden,),
        ]  # fmt: skip
        shapes = layer * self.layers_of_stages[stage]
        if stage == 0:
            shapes.append((model.seq_length, hidden))
        if stage == self.pp - 1:
            shapes += [(hidden,), (hidden,)]
        return shapes

    def has_embedding(self, stage: int) -> bool:
        """Whether a stage has a copy of the tied embedding."""
        return stage in (0, self.pp - 1)

    def numel(self, stage: int) -> int:
        """Elements of a rank's parameters, the tied embedding's copy included."""
        embedding = [self.embedding] if self.has_embedding(stage) else []
        return sum(map(math.prod, [*self.parameters(stage), *embedding]))

    def averaged(self, stage: int, settings: Settings) -> tuple[list[tuple[int, int]], list[Shape]]:
        """Shapes of the gradients that replicas average: as low-rank pairs, and whole.

        SC's warm-up is over. The rule is that of :class:`optimus_cc.gradients.GradientReduction`.
        """
        shapes = self.parameters(stage)
        if self.has_embedding(stage) and not settings.emb_comm_opt:
            shapes = [*shapes, self.embedding]
        if not settings.compresses_gradients_of(stage) or self.dp == 1:
            return [], shapes
        pairs: list[tuple[int, int]] = []
        whole: list[Shape] = []
        for shape in shapes:
            if len(shape) == 2 and saves(shape, settings.grad_comp_rank):
                pairs.append((shape[0], shape[1]))
            else:
                whole.append(shape)
        return pairs, whole

    def forward_flops(self, stage: int) -> tuple[float, float]:
        """FLOPs of a micro-batch's forward, of all shards: its layers, and the logits."""
        model = self.model
        weights = sum(
            math.prod(shape) * self.tp for shape in self.parameters(stage) if len(shape) == 2
        ) - (model.seq_length * model.hidden * self.tp if stage == 0 else 0)
        scores = 4 * model.seq_length * model.hidden * self.tokens * self.layers_of_stages[stage]
        logits = self.embedding[0] * self.tp * model.hidden if stage == self.pp - 1 else 0
        return 2.0 * weights * self.tokens + scores, 2.0 * logits * self.tokens


def product_flops(rows: int, columns: int, rank: int) -> float:
    """FLOPs of P Qᵀ; those of M Q and of Mᵀ P are as many."""
    return 2.0 * rows * columns * min(rank, rows, columns)


def factorise_flops(rows: int, columns: int, rank: int) -> float:
    """FLOPs of a step of subspace iteration and of the product of its pair.

    Three products with the matrix (M Q, Mᵀ P, P Qᵀ), and Householder QR of both factors, which
    takes 4 rank² for a row with the making of its Q.
    """
    rank = min(rank, rows, columns)
    return 3 * product_flops(rows, columns, rank) + 4.0 * rank**2 * (rows + columns)
