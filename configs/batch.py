"""The arithmetic of batches: global batch = ranks x micro-batch x accumulation."""

from __future__ import annotations


def batch_problem(global_batch: int, micro_batch: int, ranks: int) -> str:
    """Why no accumulation makes a global batch of a micro-batch and data-parallel ranks.

    Returns:
        What is wrong, and each field that could be changed alone with the nearest value that would
        do; empty where the three fit together.
    """
    together = micro_batch * ranks
    if global_batch % together == 0:
        return ""
    below, above = (global_batch // together + more for more in (0, 1))
    batches = [f"{count * together} (accumulation {count})" for count in (below, above) if count]
    ways = [f"global_batch_size {' or '.join(batches)}"]
    if size := _largest_part(global_batch, micro_batch, ranks):
        ways.append(f"micro_batch_size {size} (accumulation {global_batch // (size * ranks)})")
    if few := _largest_part(global_batch, ranks, micro_batch):
        ways.append(f"dp {few} (accumulation {global_batch // (few * micro_batch)})")
    return (
        f"global_batch_size {global_batch} is not a multiple of micro_batch_size {micro_batch} x "
        f"dp {ranks} = {together}; give {', or '.join(ways)}"
    )


def _largest_part(batch: int, most: int, other: int) -> int:
    """Largest number up to ``most`` that divides the batch together with ``other``; 0 for none."""
    return next((n for n in range(most, 0, -1) if batch % (n * other) == 0), 0)
