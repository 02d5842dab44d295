"""Tables to figures: what ``runs.csv`` and ``iterations.csv`` say, and nothing else."""
