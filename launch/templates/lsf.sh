#!/bin/bash
# A sweep as an array of jobs, a task for each point. Copy this file, change what stands below, and
# submit it in the checkout with `bsub < FILE`; submitted again, it runs what is missing. The report, when
# all have ended: bash master-script.sh --sweep stride --size full --report-only
#BSUB -J "stride[1-27]"
#BSUB -o stride-%J_%I.out
#BSUB -W 4:00
#BSUB -n 1
#BSUB -gpu "num=4"
#BSUB -r
#BSUB -x
#BSUB -wa TERM
#BSUB -wt 2
set -euo pipefail
# Points of several nodes: -n and span[ptile=1] above, a file with lines `HOST slots=4` made of
# $LSB_DJOB_HOSTFILE, and here --launcher deepspeed --hostfile FILE --no-memory-check.
sweep=(--sweep stride --size full)
# In the shell's place, so that the batch system's signals reach the launcher.
exec .venv/bin/python -m launch.sweep "${sweep[@]}" --index "$LSB_JOBINDEX" --no-report
