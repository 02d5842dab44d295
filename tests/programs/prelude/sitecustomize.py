"""Begin DeepSpeed's communication before ZeRO-3 reads a config, on a machine without a GPU.

There Accelerate begins torch's process group and not DeepSpeed's, so that ``zero.Init`` takes every
rank for the only one and refuses the batch sizes. DeepSpeed's messages by shared memory are left
out: gloo does without, and they take minutes to build. axolotl asks a single rank for NCCL, which a
machine without a GPU lacks, and gets gloo. For stock and plugin alike.
"""

import functools
import importlib.util
import sys


class BeginFirst:
    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed.runtime.zero.partition_parameters":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_wrap(module):
            load(module)
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

        spec.loader.exec_module = load_and_wrap
        return spec


sys.meta_path.insert(0, BeginFirst())
