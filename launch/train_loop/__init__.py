"""What each rank runs: megatron-core's GPT, trained under DeepSpeed or in a pipeline.

Reading order: :mod:`launch.pretrain_gpt`, :mod:`~launch.train_loop.loop`,
:mod:`~launch.train_loop.deepspeed_adapter`, :mod:`~launch.train_loop.pipeline_adapter`,
:mod:`~launch.train_loop.model`, :mod:`~launch.train_loop.data`.
"""
