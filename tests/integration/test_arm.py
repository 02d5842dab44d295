"""The host kernel on ARM: the bits of DeepSpeed's kernel, both compiled for AArch64 and emulated.

DeepSpeed's is its installed source with the flags of its builder there: ``__NEON__`` or ``__SVE__``
by the CPU, and ``__SCALAR__`` in releases that have no vectors for ARM. The adapter finds the tail
of it as it does on any machine. No speed is seen here.
"""

import ctypes
import itertools
import shutil
import struct
import subprocess
from pathlib import Path

import deepspeed
import pytest
import torch

from deep_optimizer_states.adapter.stock_adam import _GROUP, _run_ours, _run_stock, tail_of_op
from deep_optimizer_states.core.kernels import host
from deep_optimizer_states.core.kernels.adam import (
    AdamTensors,
    BetaPowers,
    adam_scalars,
    first_difference,
)
from deep_optimizer_states.core.kernels.host import HostAdam, InstructionSet

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = Path(__file__).with_name("arm_driver.cpp")
CSRC = Path(deepspeed.__file__).parent / "ops" / "csrc"
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STATES = [(F32, F32), (BF16, BF16), (BF16, F32), (FP16, FP16), (FP16, F32)]
TYPES = [F32, BF16, FP16]
SPECIAL = torch.tensor([0.0, -0.0, 1e-40, -6e-8, 65504.0, -7e4, 3e38, torch.inf, torch.nan])
BEST_SET, VECTOR_FLOATS, CREATE, STOCK, OURS = range(5)

BASE, SVE = "-march=armv8-a", "-march=armv8.2-a+sve"
NO_SVE = ("cortex-a72", 4)
WITH_SVE = [
    (f"max,sve{bits}=on,sve-default-vector-length={bits // 8}", bits // 32)
    for bits in (128, 256, 512, 2048)
]
CASES = [
    *(((simd, BASE), NO_SVE) for simd in ("-D__NEON__", "-D__SCALAR__")),
    *itertools.product([("-D__SVE__", SVE), ("-D__SCALAR__", SVE)], WITH_SVE),
]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    *(
        pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} ({package})")
        for program, package in [(COMPILER, "g++-aarch64-linux-gnu"), (QEMU, "qemu-user")]
    ),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles both kernels; ``edit`` replaces a text of ours."""
    kept = {}

    def build(flags, edit=("", "")):
        if (flags, edit) not in kept:
            kept[flags, edit] = compile_both(tmp_path_factory.mktemp("arm"), flags, edit)
        return kept[flags, edit]

    return build


def compile_both(folder, flags, edit):
    (folder / "torch").mkdir()
    heads = [f"c10/util/{name}.h" for name in ("BFloat16", "Half")]
    heads += ["cstring", "math.h", "stdexcept", "type_traits"]  # math.h: sqrt of a float is one
    extension = "".join(f"#include <{name}>\n" for name in heads)
    extension += "namespace torch { class Tensor; }\n"
    (folder / "torch" / "extension.h").write_text(extension)
    stock = (CSRC / "adam" / "cpu_adam_impl.cpp").read_text().partition("std::map<")[0]
    (folder / "stock.cpp").write_text(stock)
    for path in host.SOURCES:
        (folder / path.name).write_text(path.read_text().replace(*edit))
    paths = [folder, CSRC / "includes", Path(torch.__file__).parent / "include"]
    stock_flags = ["-O3", "-std=c++20", "-fopenmp", "-w", *flags, *(f"-I{path}" for path in paths)]
    our_flags = [flag for flag in host._FLAGS if flag not in ("-shared", "-fPIC")]
    stock_flags.append(f'-DDEEPSPEED_SOURCE="{folder}/stock.cpp"')
    for words in (
        [*stock_flags, "-c", DRIVER, "-o", folder / "driver.o"],
        [*our_flags, "-c", folder / host.SOURCES[0].name, "-o", folder / "ours.o"],
        ["-static", "-fopenmp", folder / "driver.o", folder / "ours.o", "-o", folder / "driver"],
    ):
        done = subprocess.run([COMPILER, *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder / "driver"


class Arm:
    """Both kernels on an ARM CPU: DeepSpeed's op and our library, as the adapter knows them."""

    def __init__(self, driver, cpu):
        command = [QEMU, "-cpu", cpu, str(driver)]
        self._pipe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.dos_scalar_names = host._load().dos_scalar_names  # of the same source

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pipe.communicate()

    def _ask(self, what, arrays=(), types=(0,) * 7, counts=(0,) * 3, numbers=()):
        """Send a request; arrays are addresses and sizes in bytes, and are written over."""
        padded = [*numbers, *[0.0] * (10 - len(numbers))]
        self._pipe.stdin.write(struct.pack("8i3q10f", what, *types, *counts, *padded))
        for address, size in arrays:
            self._pipe.stdin.write(ctypes.string_at(address, size))
        self._pipe.stdin.flush()
        for address, size in arrays:
            ctypes.memmove(address, self._pipe.stdout.read(size), size)

    def number(self, what):
        self._ask(what)
        return struct.unpack("q", self._pipe.stdout.read(8))[0]

    def create_adam(self, _, lr, beta1, beta2, eps, weight_decay, decoupled, __):
        types = (*(0,) * 6, decoupled)
        self._ask(CREATE, types=types, numbers=(lr, beta1, beta2, eps, weight_decay))
        self._pipe.stdout.read(8)

    def destroy_adam(self, _):
        pass

    def adam_update(self, _, step, *rest):
        numbers, (master, grad, *moments) = rest[:5], rest[6:]
        tensors = (master, grad, *moments, torch.empty_like(master))
        master_type, moment_type = host._TYPES[master.dtype], host._TYPES[moments[0].dtype]
        types = (master_type, master_type, 0, 0, master_type, moment_type, 0)
        arrays = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        self._ask(STOCK, arrays, types, (master.numel(), 0, step), numbers)

    def dos_best_set(self):
        return self.number(BEST_SET)

    def dos_adam_step(self, *given):
        master, grad, exp_avg, exp_avg_sq, weights, numel, tail = given[:7]
        grad_type, weight_type, mode, scalars, _, chosen, _, master_type, moment_type = given[7:]
        sizes = [numel * (2 if kind else 4) for kind in (master_type, grad_type, moment_type)]
        sizes = [*sizes, sizes[2], numel * (2 if weight_type else 4)]
        arrays = list(zip((master, grad, exp_avg, exp_avg_sq, weights), sizes, strict=True))
        types = (grad_type, weight_type, mode, int(chosen), master_type, moment_type, 0)
        numbers = struct.unpack("10f", ctypes.string_at(scalars, 40))
        self._ask(OURS, arrays, types, (numel, tail, 0), numbers)
        return 0.0


def numbers(numel, generator):
    """Draw numbers of every size, with zeros, infinities and NaN among them."""
    powers = torch.randint(-140, 120, (numel,), generator=generator).double()
    found = torch.randn(numel, generator=generator).double() * powers.exp2()
    found[:: numel // len(SPECIAL)][: len(SPECIAL)] = SPECIAL.double()
    return found.float()


def hard_inputs(dtypes):
    generator = torch.Generator().manual_seed(3)
    state = [numbers(1003, generator).to(dtype) for dtype in (dtypes[0], *[dtypes[1]] * 2)]
    state[2].abs_()
    return [state, *([numbers(1003, generator).to(dtypes[0])] for _ in range(3))]


def differs(arm, dtypes, decoupled, monkeypatch):
    """Return the tail that the adapter finds, and where our kernel then differs from stock's."""
    tail = tail_of_op(arm, decoupled, dtypes)
    inputs = hard_inputs(dtypes)
    for decay in (0.0, 0.1):
        group = {**_GROUP, "weight_decay": decay, "bias_correction": True}
        expected = _run_stock(arm, group, decoupled, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(host, "_load", lambda: arm)
            found = _run_ours(tail, group, decoupled, inputs)
        rest = inputs[1][0], inputs[1][0]
        difference = first_difference(AdamTensors(*found, *rest), AdamTensors(*expected, *rest))
        if difference:
            return tail, difference
    return tail, None


def in_words(case):
    (simd, _), (cpu, _) = case
    return f"{simd.strip('-D_')}-{cpu.partition('=')[0]}"


@pytest.mark.parametrize("case", CASES, ids=in_words)
def test_our_kernel_has_the_bits_of_deepspeeds(compiled, monkeypatch, case):
    flags, (cpu, vector_floats) = case
    found = {}
    with Arm(compiled(flags), cpu) as arm:
        has_sve = flags[1] == SVE
        assert arm.dos_best_set() == (InstructionSet.SVE if has_sve else InstructionSet.PORTABLE)
        assert arm.number(VECTOR_FLOATS) == vector_floats
        for dtypes, decoupled in itertools.product(STATES, (True, False)):
            found[dtypes, decoupled] = differs(arm, dtypes, decoupled, monkeypatch)
    tails = {tail for tail, _ in found.values()}
    print(f"\n{in_words(case)}: {len(found)} kinds of state, {tails}")
    assert [key for key, (_, difference) in found.items() if difference] == []


@pytest.mark.parametrize("chosen", [InstructionSet.PORTABLE, InstructionSet.SVE], ids=str)
def test_every_type_is_read_and_written_as_on_this_machine(compiled, monkeypatch, chosen):
    group = {**_GROUP, "bias_correction": True}
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 0.37, True)
    different = []
    with Arm(compiled(CASES[-1][0]), CASES[-1][1][0]) as arm:
        for dtypes, grad, weights, mode in itertools.product(STATES, TYPES, TYPES, range(3)):
            state, (gradient,), *_ = hard_inputs(dtypes)
            rest = gradient.to(grad), torch.zeros(len(gradient), dtype=weights)
            here, there = (AdamTensors(*(t.clone() for t in (*state, *rest))) for _ in range(2))
            HostAdam(mode).step(here, scalars, 501, num_threads=1)
            with monkeypatch.context() as patch:
                patch.setattr(host, "_load", lambda: arm)
                HostAdam(mode, chosen).step(there, scalars, 501, num_threads=1)
            if found := first_difference(there, here):
                different.append((dtypes, grad, weights, mode, found))
    assert different == []


@pytest.mark.parametrize("case", [CASES[0], CASES[-5]], ids=in_words)
def test_another_quotient_and_another_contraction_are_seen(compiled, monkeypatch, case):
    """Negative controls, in our kernel and in DeepSpeed's."""
    flags, (cpu, _) = case
    edit = ("first / denominator", "first * (1.0f / denominator)")
    with Arm(compiled(flags, edit), cpu) as arm:
        assert differs(arm, (F32, F32), True, monkeypatch)[1] is not None
    scalar = ("-D__SCALAR__", flags[1])
    modes = []
    for contraction in ("fast", "off"):
        with Arm(compiled((*scalar, f"-ffp-contract={contraction}")), cpu) as arm:
            modes.append(tail_of_op(arm, True).mode)
    assert modes[0] != modes[1] == 2
