"""A run's checkpoint as a model of Hugging Face; :mod:`launch.zero_shot` judges it."""
