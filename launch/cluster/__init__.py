"""Jobs of batch systems: Slurm, PBS Professional, LSF."""
