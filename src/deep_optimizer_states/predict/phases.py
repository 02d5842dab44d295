"""Forward and backward of one rank: what is computed, what is gathered, what gradients cost.

A layer's forward takes ``flops / device_flops + bytes / device_stream``, since matrix products and
elementwise work run one after the other, and what its kernels and hooks cost however few tokens
there are. Backward is two forwards, and one more where activations are recomputed. Beside that,
gathered parameters and gradients pass through the device's own memory a few times: that is work for
each parameter, not for each token, so a larger micro-batch does not repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.offload import memory_of
from deep_optimizer_states.predict.memory.setting import DEFAULT_BUCKET_NUMEL
from deep_optimizer_states.predict.rank import num_nodes, rank_of
from deep_optimizer_states.predict.workload import Workload, WorkloadError

HIDDEN_PASSES = 8
"""Elementwise passes over a layer's hidden state in one forward: norms, rotary, residuals."""
FFN_PASSES = 4
"""Over its inner state: both halves of SwiGLU read and written, and their product."""
SCORE_PASSES = 4
"""Over its attention scores where they are materialised: written, softmax, read."""
LOGIT_BYTES = 16
"""A logit: fp32 copy, softmax and loss."""
GRAD_PASSES = 7
"""Over the gradients of the whole model in every backward, however few tokens: copied into the
bucket and laid out by rank, both of which read and write, averaged in place, read to be reduced."""
GATHERED_PASSES = 3
"""Over the gathered parameters of the whole model in every forward and backward: written by the
gather, then put together, which reads and writes. A single rank uses its parameters in place."""
LAYERS_BACK = 2
"""A layer's backward in forwards."""


@dataclass(frozen=True)
class Phases:
    """Phases of one iteration, in seconds."""

    forward_s: float  # all forwards
    backward_s: float  # all backwards, with what gradients cost
    computed_s: float  # computing alone, of all forwards and backwards
    layer_s: float  # one layer's forward, of one micro-batch
    head_s: float  # the output layer's and the loss, the same
    flush_s: float  # part of backward_s that gradients on their way to host memory add
    outside_s: float  # outside all phases


def phases_of(workload: Workload, machine: Machine) -> Phases:
    """Return forward and backward of one iteration, in closed form.

    Raises:
        MachineError: A rate that is needed was not measured.
        WorkloadError: The machine cannot hold the tensor-parallel ranks, or its profile does not
            say how fast it computes in the workload's dtype.
    """
    num_nodes(workload, machine)
    if machine.gpus and workload.dtype == "fp32":
        raise WorkloadError(
            f"dtype = 'fp32': machine '{machine.name}' has a rate for 16-bit matrix products only "
            "(device_flops_per_s); use bf16 or fp16"
        )
    free = 1.0 - workload.hog_share
    if not machine.gpus:
        free /= workload.ranks  # which share the host's cores
    flops_per_s = machine.rate("device_flops_per_s") * free
    stream = machine.rate("device_stream_bytes_per_s") * free
    costs, layers = machine.costs, workload.model.layers
    layer = _layer_s(workload, flops_per_s, stream) + costs.launch_s
    logits = workload.tokens * workload.model.padded_vocab_size(workload.tp) / workload.tp
    head = 2 * logits * workload.model.hidden / flops_per_s + LOGIT_BYTES * logits / stream
    whole = sum(workload.model.tensors(workload.tp)) * workload.weight_bytes
    gathered = GATHERED_PASSES * whole / stream if workload.dp > 1 else 0.0
    gather = _gather_s(workload, machine, whole)
    # Gathers run ahead of the layers that use them; reduce-scatters behind.
    computed = layers * layer + head + gathered
    forward = max(computed, gather) + layers * costs.layer_s
    again = LAYERS_BACK + (1 if workload.activation_checkpointing else 0)
    computed_back = layers * layer * again + LAYERS_BACK * head + gathered
    computed_back += GRAD_PASSES * whole / stream
    back = max(computed_back, 2 * gather)
    flush = _flush_s(workload, machine, back)
    forward_more_s, outside_more_s = 0.0, 0.0
    if workload.software:
        forward_more_s = workload.software.forward_s.get(machine.name, 0.0)
        outside_more_s = workload.software.outside_s.get(machine.name, 0.0)
    accumulation = workload.accumulation
    return Phases(
        forward_s=accumulation * forward + forward_more_s,
        backward_s=accumulation * back + flush,
        computed_s=accumulation * (computed + back),
        layer_s=layer,
        head_s=head,
        flush_s=flush,
        outside_s=costs.iteration_s + accumulation * costs.micro_batch_s + outside_more_s,
    )


def _layer_s(workload: Workload, flops_per_s: float, stream: float) -> float:
    """Return the products and the elementwise passes of one layer's forward."""
    model, tokens, tp = workload.model, workload.tokens, workload.tp
    layer_numel = sum(model.tensors(tp)[1:7])
    # Scores times values and queries times keys; causal masks do not save work here.
    attention_flops = 4 * workload.sequence * model.hidden / tp
    flops = tokens * (2 * layer_numel + attention_flops)
    scores = model.heads * workload.sequence / tp if workload.materialized_attention else 0.0
    passes = HIDDEN_PASSES * model.hidden + FFN_PASSES * model.ffn / tp + SCORE_PASSES * scores
    return flops / flops_per_s + tokens * passes * workload.weight_bytes / stream


def _gather_s(workload: Workload, machine: Machine, whole_bytes: float) -> float:
    """Return the time to move all parameters of the model to this rank once."""
    if not machine.gpus:
        return 0.0
    gather = 0.0
    if workload.dp > 1:
        moved = whole_bytes * (workload.dp - 1) / workload.dp
        gather = moved / machine.rate("gather_bytes_per_s")
    if workload.weights_on_host:
        # Each rank brings its own share over its own link, and then the ranks exchange shares.
        gather += whole_bytes / workload.dp / rank_of(workload, machine).h2d_bytes_per_s
    return gather


def _flush_s(workload: Workload, machine: Machine, back_s: float) -> float:
    """Return what gradients add to backward on their way to host memory."""
    if not machine.gpus:
        return 0.0
    numel = sum(workload.subgroups) * workload.offload_ratio
    software = workload.software
    num_bytes = software.flush_bytes if software else workload.weight_bytes
    if software and not software.hides_flush:
        return numel * num_bytes / machine.rate("pageable_d2h_bytes_per_s")
    flush = numel * num_bytes / machine.rate("d2h_bytes_per_s")
    if numel and workload.policy in ("stride", "all-device"):
        # What the device is sure to update stays there; a dynamic split is not known in backward.
        kept = memory_of(workload, machine, workload.policy).device_grads_bytes
        flush *= max(0.0, 1 - kept / (workload.weight_bytes * numel))
    last = min(1.0, DEFAULT_BUCKET_NUMEL / (workload.dp * numel)) if numel else 0.0
    return max(flush - back_s, flush * last)
