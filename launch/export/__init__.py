"""A run's checkpoint as a model of Hugging Face."""
