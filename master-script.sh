#!/usr/bin/env bash
# Sets up once, then runs the main job: a sweep, its tables, its figures and its report.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
usage: bash master-script.sh [options]

Runs stock DeepSpeed, asynchronous gradients and the hybrid update one after the other on the same
data, and compares them. Without a GPU the model is `tiny`, otherwise the largest that fits.

  --list               list sweeps and points, and leave
  --sweep NAME         name or TOML file of a sweep [default basic]
  --model NAME         run this model instead of the sweep's
  --iterations N       iterations of each run
  --device V           auto, cpu or cuda [default auto]
  --results-dir DIR    folder of all results; nothing in it is overwritten [default results]
  --dry-run            show points, commands, DeepSpeed's JSON and predicted memory; start nothing
  --timeout SECONDS    end a run that takes longer
  --echo, --no-echo    copy the runs' logs to the terminal [default no]
  --no-memory-check    start a run even if memory looks short
  --help               this text

Exit code: 0 when every run is ok and every comparison equal; 130 after Ctrl-C.
TEXT
}

for word in "$@"; do
  case $word in
    -h | --help) usage && exit 0 ;;
  esac
done

make --no-print-directory -s -C "$root" setup
# -P keeps the caller's folder, which may hold a package `launch` of its own, off the path.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$root/.venv/bin/python" -P -m launch.sweep "$@"
