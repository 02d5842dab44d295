"""What stock's stages 1 and 2 copy with the optimizer offloaded: what predictions take it to be."""

import json

import pytest
from prepared import DEEPSPEED
from ranks import run_script

from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import flat_copies
from deep_optimizer_states.predict.simulated_update import CAST_BYTES
from deep_optimizer_states.predict.workload import STOCK, Workload

CASES = [(stage, accumulation) for stage in (1, 2) for accumulation in (1, 3)]
"""Stage of ZeRO, micro-batches of an iteration."""
COUNT = """
import json, sys
from collections import Counter
import deepspeed, torch
from torch.utils._python_dispatch import TorchDispatchMode

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
Linear = torch.nn.Linear


class Copies(TorchDispatchMode):
    def __init__(self, optimizer):
        super().__init__()
        names = {
            "home": [optimizer.single_partition_of_fp32_groups[0].grad],
            "home ": list(optimizer.accumulated_grads_in_cpu.values()),
            "back": [optimizer.temp_grad_buffer_for_gpu_offload],
            "cast": [optimizer.param_buffer_of_bit16_for_cpu_offload_groups[0]],
            "weights": [optimizer.bit16_groups_flat[0]],
        }
        self.names = {
            tensor.untyped_storage().data_ptr(): name.strip()
            for name, tensors in names.items()
            for tensor in tensors
        }
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            name = self.names.get(args[0].untyped_storage().data_ptr())
            if name:
                self.counts[name] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


found = []
for stage, accumulation in json.loads(sys.argv[1]):
    model = torch.nn.Sequential(*[Linear(64, 64, bias=False) for _ in range(3)]).bfloat16()
    numel = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def iterate():
        for _ in range(accumulation):
            sample = torch.ones(1, 64, dtype=torch.bfloat16)
            engine.backward(engine(sample).float().pow(2).mean())
            engine.step()

    iterate()
    with Copies(engine.optimizer) as copies:
        iterate()
    found.append({name: count / numel for name, count in copies.counts.items()})
torch.distributed.destroy_process_group()
print(json.dumps(found).replace(" ", ""), file=RESULTS)
"""


@pytest.mark.slow
def test_gradients_and_weights_are_copied_as_often_as_predicted():
    (words,) = run_script(COUNT, json.dumps(CASES), modules=DEEPSPEED)
    model, _ = load_model("tiny")
    for (stage, accumulation), found in zip(CASES, json.loads(words), strict=True):
        workload = Workload(model, STOCK, stage=stage, accumulation=accumulation)
        home, back = flat_copies(workload)
        assert found["home"] == home
        assert found.get("back", 0) == back
        # fp32 is read and 16 bits are written to the buffer, which is what goes to the device.
        assert found["cast"] == found["weights"] == workload.weight_bytes == CAST_BYTES - 4
