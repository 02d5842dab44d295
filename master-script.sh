#!/usr/bin/env bash
# Sets up once, then runs the main job: a sweep, its tables, its figures and its report.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
usage: bash master-script.sh [options]

Runs the engines of a study one after the other on the same data, and compares them. The default study
is the paper's: stock DeepSpeed, and the plugin with its policies all-host and stride, on a GPU auto
too. Without a GPU a sweep runs in its small form, on a small model. The same command again goes on
where it stopped: what is done, with the same code on the same machine, stays; a point that is run
again says why.

what    --list              list studies with their sweeps, points and engines, and leave
        --study NAME        name or folder of a study [default the paper's]
        --sweep NAME        name or TOML file of a sweep [default the study's]; --all: every sweep
        --engines A,B       these engines in place of the sweep's, as in stock,stride,dynamic; their
                            own fields are set like any other (--stride 4)
        --only POINT        this point alone: name, part of it or pattern; may be repeated
        --index N           the N-th point alone, as a task of a job array does
        --size SIZE         auto, tiny or full [default auto: tiny without a GPU]
        --model NAME        run this model instead of the sweep's
        --iterations N      iterations of each run; --repeats N: runs of each point
        --minutes N         start no run that is not likely to end within so many minutes
        --FIELD VALUE       any field of a point, in every run that takes it: --lr 1e-4, --dtype fp32,
                            --device auto|cpu|cuda, --model.vocab-size N, --data-prefix P (of a .bin/.idx
                            pair, or embedded, or oscar-1gb)
again   --again             everything, done or not
        --report-only       run nothing, make the report anew; --no-report: leave it out
how     --dry-run           show what would run and why: points, commands, JSON, memory and time
        --results-dir DIR   folder of all results [default results]; run folders stay as they are, and
                            tables, figures and report are made anew from the newest run of each point
        --timeout SECONDS   end a run that takes longer; --hang-timeout: that stands still so long
        --no-memory-check   start a run even if memory looks short; --share: beside other calls' runs
        --raw               the runs' logs in place of a line that tells how each fares
        --log-to NAMES      loggers for each run, with commas between: wandb,tensorboard,csv
        --monitor-interval SECONDS, 0 for never
where   --launcher torchrun|deepspeed|srun, --hostfile FILE, --nnodes N, --rdzv-endpoint HOST:PORT
trainer --trainer megatron-core|megatron-pipeline|lightning|megatron-deepspeed, --megatron-dir DIR,
        --megatron-flag WORD, --continue-from RUN_FOLDER, --deepspeed-config FILE
predict --simulate          predict the sweep in its full form, run nothing: tables, figures, report
        --machine NAME      on which machine: h100x4, a100x4, h200x1, cpu-only or a calibrated file
        --help              this text

Exit code: 0 when every run is ok and every comparison equal; 130 after Ctrl-C.
TEXT
}

look=
for word in "$@"; do
  case ${word//_/-} in
    -h | --help) usage && exit 0 ;;
    --list | --dry-run) look=${word//_/-} ;;
  esac
done

# Who only looks is not made to wait for a set-up that they did not ask for.
if [[ -z $look ]]; then
  make --no-print-directory -s -C "$root" setup
elif [[ ! -e $root/.venv/.ready || -e $root/.venv/.unfinished ]]; then
  if [[ $look == --list ]]; then
    PYTHONSAFEPATH=1 PYTHONPATH=$root exec "${PYTHON:-python3}" -m launch.listing "$@"
  fi
  echo "error: $look needs the packages: run \`make setup\` in $root first (minutes, once)" >&2
  exit 2
fi
# -P keeps the caller's folder, which may hold a package `launch` of its own, off the path.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$root/.venv/bin/python" -P -m launch.sweep "$@"
