"""What the device kernel compiles to: only operations whose rounding IEEE 754 fixes."""

import re

import pytest

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("capability", [80, 90])
def test_every_float_operation_rounds_to_nearest(capability, decoupled, tail):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deep_optimizer_states.kernels.triton_adam import adam_kernel

    constants = {"HAS_DECAY": True, "DECOUPLED": decoupled, "STATE_FUSED_TAIL": tail, "BLOCK": 1024}
    types = dict.fromkeys(adam_kernel.arg_names, "fp32") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "*fp32")
    types |= {"grad": "*bf16", "weights": "*bf16", "numel": "i64", "tail": "i64"}
    source = ASTSource(
        fn=adam_kernel,
        signature=types,
        constexprs={(adam_kernel.arg_names.index(name),): v for name, v in constants.items()},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False, "enable_reflect_ftz": False},
    )
    operations = set(re.findall(r"\b(\w+\.[\w.]*f(?:32|64|16))\b", compiled.asm["ptx"]))
    arithmetic = {
        op for op in operations if not op.startswith(("ld.", "st.", "mov.", "cvt.", "selp."))
    }
    assert arithmetic == {"fma.rn.f32", "mul.rn.f32", "sqrt.rn.f32", "div.rn.f32"}
