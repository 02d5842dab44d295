#!/bin/bash
# A sweep as an array of jobs, a task for each point. Copy this file, change what stands below, and
# submit it in the checkout with `qsub`; submitted again, it runs what is missing. The report, when
# all have ended: bash master-script.sh --sweep stride --size full --report-only
#PBS -N stride
#PBS -j oe
#PBS -J 1-27
#PBS -l walltime=04:00:00
#PBS -l select=1:ngpus=4:mpiprocs=1
#PBS -l place=scatter:excl
#PBS -r y
set -euo pipefail
cd -- "$PBS_O_WORKDIR"
# Points of several nodes: select above, a file with lines `HOST slots=4` made of $PBS_NODEFILE, and here
# --launcher deepspeed --hostfile FILE --no-memory-check.
sweep=(--sweep stride --size full)
# In the shell's place, so that the batch system's signals reach the launcher.
exec .venv/bin/python -m launch.sweep "${sweep[@]}" --index "$PBS_ARRAY_INDEX" --no-report
