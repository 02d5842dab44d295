"""The trainer with a pipeline: megatron-core's GPT over TP, PP and DP, without DeepSpeed.

Communication may be compressed (``optimus_cc``). Reading order:
:mod:`~launch.trainer.pipeline.pretrain_gpt`, :mod:`~launch.trainer.pipeline.loop`,
:mod:`~launch.trainer.pipeline.stage`, :mod:`~launch.trainer.pipeline.optimizer`.
"""
