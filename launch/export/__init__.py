"""A run's checkpoint as a model of Hugging Face: shards joined, weights renamed, tokenizer added.

Reading order: :mod:`~launch.export.__main__` (the command), :mod:`~launch.export.shards`,
:mod:`~launch.export.gpt2`, :mod:`~launch.export.tokenizer`. :mod:`launch.zero_shot` judges it.
"""
