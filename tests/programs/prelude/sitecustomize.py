"""What a program needs on a machine without a GPU, for stock and plugin alike.

There Accelerate begins torch's process group and not DeepSpeed's, so that ``zero.Init`` takes every
rank for the only one and refuses the batch sizes. DeepSpeed's messages by shared memory are left
out: gloo does without, and they take minutes to build. axolotl asks a single rank for NCCL, which a
machine without a GPU lacks, and gets gloo; and it has no way to tell Transformers to use the CPU.
LLaMA-Factory imports torchaudio for sounds, and each release of that loads with one of torch alone.
"""

import functools
import importlib.machinery
import importlib.util
import sys


class Change:
    """Changes a module as soon as it is loaded."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            self.change(module)

        spec.loader.exec_module = load_and_change
        return spec


class Empty:
    """Finds an empty module where no other is found."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torchaudio" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        pass


def begin_first(module):
    """Begin DeepSpeed's communication before ZeRO-3 reads a config."""
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    begin = module.dist.init_distributed
    module.dist.init_distributed = lambda dist_backend=None, **given: begin("gloo", **given)
    init = module.Init.__init__

    @functools.wraps(init)
    def begin_and_init(*args, **kwargs):
        import torch

        if torch.distributed.is_initialized():
            module.dist.init_distributed()
        init(*args, **kwargs)

    module.Init.__init__ = begin_and_init


def use_cpu(module):
    """Let Transformers use the CPU, whoever makes its arguments."""
    check = module.TrainingArguments.__post_init__

    @functools.wraps(check)
    def choose_and_check(self):
        self.use_cpu = True
        check(self)

    module.TrainingArguments.__post_init__ = choose_and_check


sys.meta_path.insert(0, Change("deepspeed.runtime.zero.partition_parameters", begin_first))
sys.meta_path.insert(0, Change("transformers.training_args", use_cpu))
sys.meta_path.append(Empty())
