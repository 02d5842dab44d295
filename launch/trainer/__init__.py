"""The trainers: megatron-core's GPT, under DeepSpeed or in a pipeline, one process a rank.

Reading order: :mod:`launch.pretrain_gpt`, :mod:`~launch.trainer.loop`,
:mod:`~launch.trainer.deepspeed_adapter`, :mod:`~launch.trainer.pipeline_adapter`,
:mod:`~launch.trainer.model`, :mod:`~launch.trainer.data`.
"""
