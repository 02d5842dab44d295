#!/usr/bin/env bash
# Builds the environment in the folder given: pinned packages, then the compiled ops.
# Read from the environment:
#   PYTHON            interpreter to build with (python3)
#   USE_OWN_TORCH=1   take torch and what else PYTHON's environment has, install only what is missing
#   WHEELHOUSE=DIR    install from the wheels in DIR alone, without a network
#   TORCH_VERSION     torch to install (2.13.0)
set -euo pipefail
venv=${1:?usage: setup.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q)

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
  die "PYTHON=$python is $("$python" -V 2>&1); Python 3.11 to 3.13 is needed: make setup PYTHON=python3.12"
command -v "${CXX:-c++}" >/dev/null ||
  die "no C++ compiler (${CXX:-c++}); DeepSpeed's CPUAdam and our kernel need one: install g++"

if [ -n "${WHEELHOUSE:-}" ]; then
  [ -d "$WHEELHOUSE" ] || die "WHEELHOUSE=$WHEELHOUSE is not a folder"
  pip+=(--no-index --find-links "$WHEELHOUSE")
fi
site=()
if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
  "$python" -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert v >= (2, 11), v' ||
    die "USE_OWN_TORCH=1, but $python has no torch >= 2.11"
  site=(--system-site-packages)
fi

say "environment in $venv (minutes, once)"
"$python" -m venv "${site[@]}" "$venv"
if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
  # The packages already there are kept as they are: their owner matched them to this torch.
  "$venv/bin/python" "$here/missing.py" "$here/run.txt" "$here/dev.txt" >"$venv/missing.txt"
  grep -v '^deepspeed==' "$venv/missing.txt" >"$venv/missing-others.txt" || true
  "${pip[@]}" wheel setuptools
  "${pip[@]}" -r "$venv/missing-others.txt"
  ! grep -q '^deepspeed==' "$venv/missing.txt" ||
    DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation "$(grep '^deepspeed==' "$venv/missing.txt")"
else
  "${pip[@]}" "torch==${TORCH_VERSION:-2.13.0}" "$(grep '^numpy==' "$here/run.txt")" setuptools wheel
  # DeepSpeed is published as source; its setup imports torch, so it is built in this environment.
  DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation "$(grep '^deepspeed==' "$here/run.txt")"
  "${pip[@]}" -r "$here/run.txt" -r "$here/dev.txt"
fi
"${pip[@]}" --no-build-isolation --no-deps -e "$here/.."

say "building the compiled ops into $TORCH_EXTENSIONS_DIR"
# A build that was killed leaves a lock on which the next one would wait for ever.
find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2>/dev/null || true
"$venv/bin/python" -W ignore -m deep_optimizer_states.build
say "ready"
