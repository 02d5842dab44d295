#!/bin/bash
# A sweep as an array of jobs, a task for each point. Copy this file, change what stands below, and
# submit it in the checkout with `sbatch`; submitted again, it runs what is missing. The report, when
# all have ended: bash master-script.sh --sweep stride --size full --report-only
#SBATCH --job-name=stride
#SBATCH --array=1-27
#SBATCH --time=04:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail
# Points of several nodes: --nodes above, and here --launcher srun --no-memory-check.
sweep=(--sweep stride --size full)
# In the shell's place, so that the batch system's signals reach the launcher.
exec .venv/bin/python -m launch.sweep "${sweep[@]}" --index "$SLURM_ARRAY_TASK_ID" --no-report
