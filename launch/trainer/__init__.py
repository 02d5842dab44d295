"""The trainer: megatron-core's GPT under DeepSpeed, one process a rank.

Reading order: :mod:`launch.pretrain_gpt`, :mod:`~launch.trainer.loop`,
:mod:`~launch.trainer.model`, :mod:`~launch.trainer.data`.
"""
