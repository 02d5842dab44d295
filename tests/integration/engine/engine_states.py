"""State of engines that trained, and what differs of two. Not a test itself."""

import torch


def state_of(engine):
    """Every tensor of the optimizer's state, on the host as stock has it.

    Padding is cut off: stock leaves it uninitialised.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):  # below stage 3
        return flat_state_of(engine)
    result = {}
    for idx, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state[master]
        tensors = {
            "master": master.data,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "weights": optimizer.fp16_partitioned_groups_flat[idx],
        }
        partitions = optimizer.fp16_partitioned_groups[idx]
        for name, tensor in tensors.items():
            pieces = tensor.detach().to("cpu", copy=True).split([p.numel() for p in partitions])
            for number, (piece, pad) in enumerate(
                zip(pieces, optimizer.groups_padding[idx], strict=True)
            ):
                result[f"{name}/{idx}/{number}"] = piece.narrow(0, 0, piece.numel() - pad)
    return result


def flat_state_of(engine):
    """The same below stage 3, padding and gradients too, which stock leaves nowhere to chance."""
    optimizer, result = engine.optimizer, {}
    for idx, master in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[idx])
        state = optimizer.optimizer.state[master]
        tensors = {
            "master": master.data,
            "grad": master.grad,
            **{name: torch.as_tensor(value) for name, value in state.items()},
            "weights": optimizer.parallel_partitioned_bit16_groups[idx][rank],
            "weights of all ranks": optimizer.bit16_groups_flat[idx],
        }
        for name, tensor in tensors.items():
            result[f"{name}/{idx}"] = tensor.detach().to("cpu", copy=True)
    for name, param in engine.module.named_parameters():
        result[name] = param.detach().to("cpu", copy=True)
    return result


def differences(ours, stock):
    (losses, norms, *seen), state = ours
    (stock_losses, stock_norms, *stock_seen), stock_state = stock
    found = []
    if seen != stock_seen:
        found.append("what was saved on the way")
    if losses != stock_losses:
        found.append("losses")
    if norms != stock_norms:
        found.append("gradient norms")
    assert state.keys() == stock_state.keys()
    found += [key for key in state if not torch.equal(state[key], stock_state[key])]
    if not all(torch.isfinite(torch.tensor(stock_losses))):
        found.append("stock itself does not train: the comparison proves nothing")
    return found
