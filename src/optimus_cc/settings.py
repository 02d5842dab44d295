"""Settings of compression, under the names of the options of Optimus-CC's artifact."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

NO_INTERLEAVING = (
    "compressed backpropagation needs the 1F1B schedule with one stage a rank: it counts on each "
    "link carrying every micro-batch once, and on its epilogue"
)

METHODS = {
    "inter_grad_comp_method": ("low-rank", "hadamard-4bit", "fp8"),
    "grad_comp_method": ("power-sgd", "torch-power-sgd", "4bit"),
}
"""Ways to compress a message between stages, and gradients over replicas."""
_NEEDS = {
    "inter_grad_comp_epilogue_only": ("inter_grad_comp",),
    "inter_grad_comp_method": ("inter_grad_comp",),
    "check_orth_error": ("inter_grad_comp",),
    "selective_grad_comp": ("grad_comp",),
    "grad_comp_method": ("grad_comp",),
    "use_error_feedback": ("inter_grad_comp", "grad_comp"),
}
"""Settings that have no effect without one of others."""
_SPELLINGS = {"check_orth_error": ["--check_orth_error_acti"]}
"""What the artifact calls an option that has another name here."""


class SettingsError(ValueError):
    """A setting is wrong or does not go with another; the message says what to do instead."""


@dataclass(frozen=True)
class Settings:
    """Settings of the three schemes; the defaults compress nothing.

    Each field is an option of that name. What the artifact's README says is the default of the
    ranks and of the warm-up; its scripts use rank 16 and no warm-up.
    """

    inter_grad_comp: bool = False
    """CB: compress the activation gradients that are sent to the previous stage."""
    inter_grad_comp_method: str = "low-rank"
    """How: ``low-rank`` pairs, ``hadamard-4bit`` or ``fp8`` numbers (:mod:`optimus_cc.formats`)."""
    inter_grad_comp_rank: int = 12
    """Columns of P and Q of an activation gradient, when messages are ``low-rank``."""
    inter_grad_comp_epilogue_only: bool = False
    """Only those that no forward overlaps: after the last steady step and in the cool-down."""
    use_error_feedback: bool = False
    """Add what a message left out to the next: LEP for CB, error feedback for --grad_comp."""
    emb_comm_opt: bool = False
    """FE: reduce the tied embedding's gradient once, over both stages and all replicas."""
    grad_comp: bool = False
    """Compress matrices' gradients when they are reduced over the data-parallel ranks."""
    grad_comp_method: str = "power-sgd"
    """How: as low-rank pairs by our ``power-sgd`` or by ``torch-power-sgd``, or in ``4bit``."""
    grad_comp_rank: int = 128
    """Columns of P and Q of a parameter's gradient, when they are low-rank."""
    grad_comp_warm_up: float = 0.1
    """Share of the iterations, from the start, in which gradients are reduced whole."""
    selective_grad_comp: bool = False
    """SC: gradients of the first stages only, which are the last to be ready."""
    selective_grad_comp_way: int = 2
    """How many stages from the first on."""
    check_orth_error: bool = False
    """Compare what messages left out with the activations, as error propagation assumes."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: a value is out of range, or a setting has no effect without another.
        """
        for name in ("inter_grad_comp_rank", "grad_comp_rank", "selective_grad_comp_way"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name} = {value}: must be a whole number from 1")
        if not 0.0 <= self.grad_comp_warm_up < 1.0:
            raise SettingsError(
                f"grad_comp_warm_up = {self.grad_comp_warm_up}: must be a share of the "
                "iterations, from 0 to less than 1"
            )
        for name, known in METHODS.items():
            value = getattr(self, name)
            if value not in known:
                raise SettingsError(f"{name} = {value!r}: must be one of {', '.join(known)}")
        for name, one_of in _NEEDS.items():
            value = getattr(self, name)
            is_default = value == self.__dataclass_fields__[name].default
            if not is_default and not any(getattr(self, other) for other in one_of):
                needed = " or ".join(f"--{other}" for other in one_of)
                raise SettingsError(f"{name} = {value!r}: has no effect without {needed}; add it")

    def check_stages(self, num_stages: int) -> None:
        """Check the settings against a pipeline.

        Raises:
            SettingsError: there is nothing to compress backpropagation between, or there are fewer
                stages than were selected.
        """
        if self.inter_grad_comp and num_stages < 2:
            raise SettingsError(
                f"inter_grad_comp = True: a pipeline of {num_stages} stage sends no activation "
                "gradients; use two stages or more, or leave it out"
            )
        if self.selective_grad_comp and self.selective_grad_comp_way > num_stages:
            raise SettingsError(
                f"selective_grad_comp_way = {self.selective_grad_comp_way}: the pipeline has "
                f"{num_stages} stages; select at most as many"
            )

    def compresses_message(self, in_epilogue: bool) -> bool:
        """Return whether an activation gradient is compressed that is sent there."""
        return self.inter_grad_comp and (in_epilogue or not self.inter_grad_comp_epilogue_only)

    def compresses_gradients_of(self, stage: int) -> bool:
        """Return whether a stage's gradients are compressed after the warm-up; stages from 0."""
        return self.grad_comp and (
            not self.selective_grad_comp or stage < self.selective_grad_comp_way
        )

    def warm_up_iterations(self, num_iterations: int) -> int:
        """Return how many of all iterations reduce gradients whole.

        Raises:
            SettingsError: the number of iterations is not positive.
        """
        if num_iterations < 1:
            raise SettingsError(f"num_iterations = {num_iterations}: must be a number from 1")
        # 0.29 of 100 is 28.999999999999996 in floating point, and 29 is meant.
        return int(self.grad_comp_warm_up * num_iterations + 1e-9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the artifact's options to a program's own."""
    group = parser.add_argument_group("compressed communication")
    for field in fields(Settings):
        names = [f"--{field.name}", *_SPELLINGS.get(field.name, [])]
        if isinstance(field.default, bool):
            group.add_argument(*names, action="store_true", dest=field.name)
        else:
            kind = type(field.default)
            group.add_argument(*names, type=kind, default=field.default, dest=field.name)


def from_arguments(arguments: argparse.Namespace) -> Settings:
    """Return the settings among a program's parsed arguments.

    Raises:
        SettingsError: see :class:`Settings`.
    """
    return Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
