"""Bytes that autograd keeps of a model, read off the tensors that it saves."""

import torch


def saved_bytes(model, compute):
    """Bytes of all storage that autograd keeps for backward of ``compute()``, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert compute().requires_grad
    return sum(found.values())
