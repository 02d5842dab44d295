"""Device tensors of the stand-in for CUDA, and the names of torch that it is put under.

What of CUDA and torch it repeats:

- Fresh memory holds no numbers (NaN). Memory whose tensors are gone goes back to the allocator. Its
  next owner writes to it in the order of the stream that it was allocated on, and only after those
  that ``record_stream`` named are done: NaN is written then.
- Operations on device tensors are queued on the current stream of their device. Those that need a
  value at once (``item``, ``equal``, ``cpu``) block. Host tensors are refused, as on a GPU.
- Copies between device and host block, unless they are ``non_blocking`` and the host's memory is
  page-locked. Such a copy keeps nothing alive: the host's memory must outlive it.

Not repeated: conversions of type on the way, copies between devices and of strided tensors are
refused; indexing with ``[]`` is not there; pageable memory always blocks, where CUDA only may.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref

import pytest
import torch
from cuda_runtime import CudaRuntime
from late import late
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from deep_optimizer_states.core.device import cuda
from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.kernels.host import HostAdam

_ATEN = torch.ops.aten
_BLOCKING = (_ATEN._local_scalar_dense.default, _ATEN.equal.default)
_REPLACED = (
    *("Stream", "Event", "stream", "current_stream", "set_device", "current_device", "device"),
    *("synchronize", "cudart", "get_device_properties"),
    *("mem_get_info", "memory_reserved", "memory_allocated", "max_memory_allocated"),
)
"""Names of ``torch.cuda`` that the stand-in takes."""


class Block:
    """Memory from the allocator; free when no tensor looks at it any more."""

    def __init__(self, runtime, device, raw):
        self.runtime, self.device = runtime, device
        self.used_by = []
        home = runtime.current_stream(device)
        weakref.finalize(self, _free, runtime, raw, home, self.used_by).atexit = False


def _free(runtime, raw, home, used_by):
    if runtime.has_ended:
        return
    if not used_by:
        home.put(lambda: _poison(raw))
        return
    points = [stream.mark() for stream in (home, *used_by)]
    for point in points:
        runtime.allocator.wait_for(point)
    runtime.allocator.put(lambda: _poison(raw))


def _poison(raw):
    """All bits set: NaN in every floating type."""
    torch.empty(0, dtype=torch.uint8).set_(raw.untyped_storage()).fill_(255)


class DeviceTensor(Tensor):
    """A tensor that says it is on a GPU; its numbers are in ``raw``, later."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, block):
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            dtype=raw.dtype,
            device="cpu",
            dispatch_device=True,
        )
        made.raw, made.block = raw, block
        return made

    def __repr__(self):
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.block.device})"

    def copy_(self, source, non_blocking=False):
        return _copy(self, source, non_blocking)

    def record_stream(self, stream):
        self.block.used_by.append(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        block = next(tensor.block for tensor in tensors if isinstance(tensor, cls))
        if func is torch.ops.prim.device.default:
            return block.device
        if func is _ATEN.copy_.default:
            return _copy(*args)
        device = torch.device(kwargs.pop("device", None) or block.device)
        if device.type == "cpu":
            assert func is _ATEN._to_copy.default, func
            return _fetch(args[0]).to(kwargs.get("dtype"))
        raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
        if func.is_view:
            return tree_map(
                lambda out: cls(out, block) if isinstance(out, Tensor) else out,
                func(*raw_args, **raw_kwargs),
            )
        if any(t.dim() and not isinstance(t, cls) for t in tensors):
            raise RuntimeError("Expected all tensors to be on the same device, cuda and cpu found")
        if func in _BLOCKING:
            block.runtime.current_stream(block.device).synchronize()
            return func(*raw_args, **raw_kwargs)
        return _queue(func, block, args, (raw_args, raw_kwargs))


def _queue(func, block, args, raw):
    """Queue an operation; its outputs are there at once, their numbers later."""
    raw_args, raw_kwargs = raw
    if func._schema.is_mutable:
        block.runtime.launch(lambda: func(*raw_args, **raw_kwargs), block.device)
        return args[0]
    meta_args, meta_kwargs = tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (raw_args, raw_kwargs)
    )
    shape = func(*meta_args, **meta_kwargs)
    made = allocate(block.runtime, torch.empty_like(shape, device="cpu"), block.device)
    out = made.raw
    block.runtime.launch(lambda: out.copy_(func(*raw_args, **raw_kwargs)), block.device)
    return made


def _copy(target, source, non_blocking=False):
    host = [tensor for tensor in (target, source) if not isinstance(tensor, DeviceTensor)]
    block = (source if host and host[0] is target else target).block
    runtime, (to, what) = block.runtime, (_raw(target), _raw(source))
    if not host:
        assert target.block.device == source.block.device, "copies between devices"
        runtime.launch(lambda: to.copy_(what), block.device)
        return target
    runtime.raise_failure()
    assert to.dtype == what.dtype, "a conversion on the way"
    assert all(side.is_contiguous() and side.shape == to.shape for side in (to, what)), "strides"
    stream = runtime.current_stream(block.device)
    if non_blocking and runtime.page_locks.hold(host[0]):
        to, what = (_borrow(raw) if raw is host[0] else raw for raw in (to, what))
        stream.put(lambda: to.copy_(what))
        runtime.page_locks.fly(host[0], stream.mark())
    else:
        stream.put(lambda: to.copy_(what))
        stream.synchronize()
    return target


def _borrow(host):
    """The same host memory, not kept alive."""
    pages = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
    return torch.frombuffer(pages, dtype=host.dtype, count=host.numel()).view(host.shape)


def _fetch(tensor):
    return _copy(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.contiguous())


def _raw(value):
    return value.raw if isinstance(value, DeviceTensor) else value


def allocate(runtime, raw, device):
    """A device tensor of ``raw``'s memory, which is made to hold no numbers."""
    if raw.numel():
        _poison(raw)
    return DeviceTensor(raw, Block(runtime, torch.device("cuda", runtime._index(device)), raw))


class QueuedAdam:
    """The host kernel as a kernel of the current stream, in place of Triton's."""

    def __init__(self, runtime, tail_mode):
        self._runtime, self._host = runtime, HostAdam(tail_mode)

    def step(self, tensors, scalars, tail_start):
        found = vars(tensors).values()
        if any(not isinstance(tensor, DeviceTensor) for tensor in found):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        raw = AdamTensors(*(tensor.raw for tensor in found))
        with self._runtime.device(tensors.master.device):
            self._runtime.launch(lambda: self._host.step(raw, scalars, tail_start, num_threads=1))


def _make(runtime, make):
    """A function of torch that makes tensors, which can make them on the device."""

    def factory(*args, device=None, **kwargs):
        if device is None or torch.device(device).type != "cuda":
            return make(*args, device=device, **kwargs)
        values = make(*args, **kwargs)
        made = allocate(runtime, torch.clone(values), device)
        raw = made.raw
        if make.__name__ != "empty":
            runtime.launch(lambda: raw.copy_(values), device)
        return made

    return factory


def _send(runtime, real_to):
    """``Tensor.to`` that knows the way to the device."""

    def to(self, *args, **kwargs):
        device = args[0] if args else None
        if not (isinstance(device, torch.device) and device.type == "cuda"):
            return real_to(self, *args, **kwargs)
        if isinstance(self, DeviceTensor):
            assert device == self.block.device, "copies between devices"
            return real_to(self, self.dtype, copy=kwargs.get("copy", False))
        made = allocate(runtime, torch.empty(self.shape, dtype=self.dtype), device)
        return _copy(made, self, kwargs.get("non_blocking", False))

    return to


@contextlib.contextmanager
def stand_in(*names, triton=True):
    """Put a runtime under ``torch.cuda``, with or without a device kernel; yields it.

    Streams, lanes and the thread of updates have no threads, and those that are named are late, as
    in ``late``; more streams may be added to ``world.late``.
    """
    cuda._cudart.cache_clear()
    with late(*names) as world, pytest.MonkeyPatch.context() as patch:
        runtime = CudaRuntime(world)
        for name in _REPLACED:
            patch.setattr(torch.cuda, name, getattr(runtime, name))
        for name in ("empty", "zeros", "ones", "full"):
            patch.setattr(torch, name, _make(runtime, getattr(torch, name)))
        patch.setattr(Tensor, "to", _send(runtime, Tensor.to))
        patch.setattr(Tensor, "is_pinned", lambda self, device=None: runtime.page_locks.hold(self))
        if triton:
            adam = property(lambda self: QueuedAdam(runtime, self._tail_mode))
            patch.setattr(cuda.CudaDevice, "_adam", adam)
        yield runtime
        runtime.has_ended = True
    cuda._cudart.cache_clear()
