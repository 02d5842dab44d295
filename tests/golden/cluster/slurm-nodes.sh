#!/bin/bash
#SBATCH --job-name=stride-points
#SBATCH --output=%x-%A_%a.out
#SBATCH --array=1-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --account=a-1
#SBATCH --partition=big
#SBATCH --time=01:30:30
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
# Everything below is quoted: no value is read by the shell.
set -eo pipefail
module load cuda
export NCCL_DEBUG=INFO
set -u
cd -- /home/me
export PYTHONPATH=/harness${PYTHONPATH:+:$PYTHONPATH}
command=(/venv/bin/python -P -m launch.sweep --sweep 'my sweep.toml')
command+=(--launcher srun --nnodes 2)
points=('tiny vanilla')
command+=(--only "${points[SLURM_ARRAY_TASK_ID - 1]}")
# In the shell's place, so that the batch system's signals reach the launcher.
exec "${command[@]}"
