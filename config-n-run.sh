#!/usr/bin/env bash
# One run by the paper's flags; `bash config-n-run.sh --help` lists them.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=$root/.venv/bin/python
if [[ ! -x $python ]]; then
  echo "error: $python is missing: run \`make setup\` in $root first" >&2
  exit 2
fi
# -P keeps the caller's folder, which may hold a package `launch` of its own, off the path.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m launch.config_n_run "$@"
