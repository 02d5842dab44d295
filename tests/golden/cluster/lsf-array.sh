#!/bin/bash
#BSUB -J "stride-points[1-3]"
#BSUB -o stride-points-%J_%I.out
#BSUB -n 32
#BSUB -R "span[ptile=32]"
#BSUB -gpu "num=4"
#BSUB -P a-1
#BSUB -q big
#BSUB -W 1:31
#BSUB -r
#BSUB -x
#BSUB -wa TERM
#BSUB -wt 2
# Everything below is quoted: no value is read by the shell.
set -eo pipefail
module load cuda
export NCCL_DEBUG=INFO
set -u
cd -- /home/me
export PYTHONPATH=/harness${PYTHONPATH:+:$PYTHONPATH}
command=(/venv/bin/python -P -m launch.sweep --sweep 'my sweep.toml')
points=('tiny vanilla' 'it'"'"'s hybrid' 7B)
command+=(--only "${points[LSB_JOBINDEX - 1]}")
# In the shell's place, so that the batch system's signals reach the launcher.
exec "${command[@]}"
