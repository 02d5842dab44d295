"""From a point to processes: DeepSpeed's JSON, run folders, supervision, sweeps."""
