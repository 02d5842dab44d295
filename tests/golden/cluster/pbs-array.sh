#!/bin/bash
#PBS -N stride-points
#PBS -j oe
#PBS -J 1-3
#PBS -l select=1:ncpus=32:ngpus=4:mpiprocs=1
#PBS -l place=scatter:excl
#PBS -A a-1
#PBS -q big
#PBS -l walltime=01:30:30
#PBS -r y
# Everything below is quoted: no value is read by the shell.
set -eo pipefail
module load cuda
export NCCL_DEBUG=INFO
set -u
cd -- /home/me
export PYTHONPATH=/harness${PYTHONPATH:+:$PYTHONPATH}
command=(/venv/bin/python -P -m launch.sweep --sweep 'my sweep.toml')
points=('tiny vanilla' 'it'"'"'s hybrid' 7B)
command+=(--only "${points[${PBS_ARRAY_INDEX:-1} - 1]}")
# In the shell's place, so that the batch system's signals reach the launcher.
exec "${command[@]}"
