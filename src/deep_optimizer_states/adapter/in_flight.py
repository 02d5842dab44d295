"""Weights of ZeRO-1 and ZeRO-2 while an update is in flight: who reads one waits for its tiles.

At stage 3 every way to a weight leads through a gather, which waits. Below it a weight is an
ordinary parameter, which anybody may read at any time. Until a parameter's own tiles are updated,
these are in the way:

*A hook before each module's forward* waits for the module's own parameters. It sees uses of which
torch does not tell: by compiled kernels, and behind the wrappers of ``torch.func``.

*The class of the parameter* is :class:`InFlight`, which torch tells of every call with one among
its arguments. So an operation in another module, ``data``, ``state_dict()`` or a copy wait as well.

Autograd reads weights in C++, so that whoever begins a run of it waits for all parameters
(``adapter/autograd_runs.py``). The first of all these gives the parameter its own class back, and
nothing is left to do for the others.

[Note: unseen reads] A module that was compiled or scripted reads weights without telling anybody,
and compiled code goes by the class that a parameter had when it was compiled. With such a module in
the model, or with a parameter of a class of its own, ``step()`` waits for the whole update. So it
does from the first time that a hook finds itself in a user's function that is compiled. A function
that gets a weight as an argument is compiled when nothing is in flight; if that happens again and
again, since the class is another each time, ``step()`` waits as well.

[Note: evaluation] In evaluation some of torch's layers have a shorter way with other bits, which
they take only if all weights below them are plain parameters. So there a module waits for all
parameters below it. Encoder layers also look for hooks, in themselves and below: they get none, and
``step()`` waits for the whole update of a model that has one.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, TransformerEncoderLayer
from torch.utils._pytree import tree_leaves

from deep_optimizer_states.adapter.barrier import Barrier

_LOOKED_AT = ("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "ndim", "layout")
_ASKED = ("size", "dim", "numel", "element_size", "is_floating_point")
_READS_NO_WEIGHT = frozenset(
    [
        *(getattr(Tensor, name) for name in _ASKED),
        *(
            getattr(getattr(Tensor, name), way)
            for name in _LOOKED_AT
            for way in ("__get__", "__set__", "__delete__")
        ),
    ]
)
"""What optimizers, frameworks and logs ask of parameters between two iterations."""
MOST_COMPILED = 4
"""Updates in flight that may meet a compiler, half of what torch compiles of one function."""


class InFlight(Parameter):
    """A parameter whose weights an update may still write, and which nobody has read since.

    Each engine has a class of its own.
    """

    weights_in_flight: WeightsInFlight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for the parameters among the arguments, and do what was asked for.

        Raises:
            UpdateError: The update failed.
        """
        kwargs = kwargs or {}
        if func is Tensor.detach and sys._getframe(1).f_code is Parameter.__new__.__code__:
            # It compares the type of what it detaches, before and after.
            cls.weights_in_flight.let_through(args[0])
            return Tensor._make_subclass(Parameter, args[0])
        waiting: list[InFlight] = []
        if func not in _READS_NO_WEIGHT:
            waiting = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, InFlight)]
        if not waiting:  # it would be asked again
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in waiting:
            if isinstance(param, InFlight):  # another thread may have been faster
                param.weights_in_flight.let_through(param)
        return func(*args, **kwargs)

    # Both ask for the class before they read, and a copy would have this one for good.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.weights_in_flight.let_through(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.weights_in_flight.let_through(self)
        return self.__reduce_ex__(protocol)


class WeightsInFlight:
    """The trained parameters of an engine below stage 3, and who may read them already.

    It owns the hooks in the engine's modules, and the class of these parameters.

    Args:
        get_module: Returns the engine's model, which the user may replace.
        params: What is trained.
        barrier: Where to wait for a parameter, by its ``id``.
    """

    def __init__(
        self, get_module: Callable[[], Module], params: Iterable[Parameter], barrier: Barrier
    ) -> None:
        self._get_module = get_module
        self._params = {id(param): param for param in params}
        self._barrier = barrier
        self._has_plain_params = all(type(param) is Parameter for param in self._params.values())
        self._class: Any = type(InFlight.__name__, (InFlight,), {"weights_in_flight": self})
        self._waiting: dict[int, Parameter] = {}
        self.is_up = False
        """Whether there are parameters that nobody has waited for."""
        self.is_compiled = False
        """Whether compiled code that is no module reads weights, see [Note: unseen reads]."""
        self._num_compiled = 0
        self._pass: Callable[[Parameter], None] = self._wait_for
        self._hooks = [
            module.register_forward_pre_hook(self._hook_of(module), prepend=True)
            for module in hookable(get_module())
        ]

    def _hook_of(self, module: Module) -> _BeforeForward:
        own, below = (
            [param for param in module.parameters(recurse) if id(param) in self._params]
            for recurse in (False, True)
        )
        return _BeforeForward(self, own, below)

    @property
    def may_wait(self) -> bool:
        """Whether every read of a weight will be seen; if not, ``step()`` waits for all."""
        return (
            self._has_plain_params
            and not self.is_compiled
            and not any(is_read_unseen(module) for module in self._get_module().modules())
        )

    def next_order(self) -> tuple[int, ...]:
        """Return the order of an update's tiles, those first that are read first."""
        return self._barrier.next_order()

    def put_up(self) -> None:
        """Let whoever reads a weight from now on wait for its tiles."""
        if "torch._dynamo" in sys.modules:
            if self._pass == self._wait_for:
                # A function that is compiled by itself may come past here; it must not see this.
                self._pass = torch.compiler.disable(self._wait_for)  # type: ignore[no-untyped-call]
            _listen_to_compiler()
            _listeners.add(self)
        self.is_up = True
        for key, param in self._params.items():
            self._waiting[key] = param
            param.__class__ = self._class

    def let_through(self, param: Parameter) -> None:
        """Wait until a parameter's tiles are updated, and let everybody read it.

        Raises:
            UpdateError: The update failed.
        """
        self._pass(param)

    def _wait_for(self, param: Parameter) -> None:
        background = self._barrier.background
        if not background.overlooks_failure:  # or it has ended, whatever became of it
            background.check()
            self._barrier.use([id(param)])
        self._give_back(param)

    def let_all_through(self) -> None:
        """Wait for the tiles of all parameters that nobody has waited for.

        Raises:
            UpdateError: The update failed.
        """
        for param in list(self._waiting.values()):
            self.let_through(param)

    def before_compiling(self) -> None:
        """Let all through, so that a compiler sees parameters as they are otherwise."""
        if self.is_up:
            self._num_compiled += 1
            self.is_compiled = self.is_compiled or self._num_compiled >= MOST_COMPILED
            self.let_all_through()

    def give_back(self) -> None:
        """Let everybody read every parameter: no update is in flight."""
        for param in list(self._waiting.values()):
            self._give_back(param)

    def take_down(self) -> None:
        """Leave nothing behind in the model."""
        for hook in self._hooks:
            hook.remove()
        self.give_back()

    def _give_back(self, param: Parameter) -> None:
        param.__class__ = Parameter
        self._waiting.pop(id(param), None)
        self.is_up = bool(self._waiting)


_listeners: weakref.WeakSet[WeightsInFlight] = weakref.WeakSet()
os.register_at_fork(after_in_child=_listeners.clear)  # no update of theirs goes on there


def _listen_to_compiler() -> None:
    from torch._dynamo.callback import callback_handler

    if _before_compiling not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_before_compiling)


def _before_compiling(*_args: Any) -> None:
    # torch holds a lock meanwhile: nothing here may compile, and who else does waits for this.
    for weights in list(_listeners):
        weights.before_compiling()


def hookable(model: Module) -> Iterator[Module]:
    """Return the modules of a model that may have a hook, see [Note: evaluation]."""
    layers = (it for it in model.modules() if isinstance(it, TransformerEncoderLayer))
    inside = {id(part) for layer in layers for part in layer.modules()}
    for module in model.modules():
        if id(module) not in inside and not isinstance(module, torch.jit.ScriptModule):
            yield module


class ModuleHook:
    """A hook of ours in a user's module. A copy of the model has one that does nothing."""

    def __reduce__(self) -> Any:
        return _hook_of_a_copy, ()


class _BeforeForward(ModuleHook):
    """Waits for the parameters of a module that is about to run."""

    def __init__(
        self, weights: WeightsInFlight, own: Sequence[Parameter], below: Sequence[Parameter]
    ) -> None:
        self._weights = weights
        self._own = own
        self._below = below

    def __call__(self, module: Module, _args: Any) -> None:
        weights = self._weights
        if torch.compiler.is_compiling():  # see [Note: unseen reads]
            weights.is_compiled = True
            if weights.is_up:
                torch.compiler.disable(weights.let_all_through)()  # type: ignore[no-untyped-call]
        elif weights.is_up:
            # See [Note: evaluation]. A transform hides the class of what it works on.
            is_seen = module.training and not torch._C._are_functorch_transforms_active()
            for param in self._own if is_seen else self._below:
                if isinstance(param, InFlight):
                    weights.let_through(param)


def _hook_of_a_copy() -> Callable[..., None]:
    return _nothing


def _nothing(_module: Module, _args: Any) -> None:
    pass


def is_read_unseen(module: Module) -> bool:
    """Return whether reads of a module's weights cannot be waited for one by one."""
    is_compiled = (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )
    return is_compiled or isinstance(module, (torch.jit.ScriptModule, TransformerEncoderLayer))
