#!/usr/bin/env bash
# Builds the environment in the folder given: pinned packages, then the compiled ops.
# Read from the environment:
#   PYTHON            interpreter to build with (python3)
#   USE_OWN_TORCH=1   take torch and what else PYTHON's environment has, install only what is missing
#   WHEELHOUSE=DIR    install from the wheels in DIR alone, without a network
#   TORCH_VERSION     torch to install (2.13.0)
#   SETUP_BEAT_S      seconds of silence until a line says that a long step is still at work (20)
set -euo pipefail
venv=${1:?usage: setup.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off)

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Says what a long step, whose output it reads, is at: each package that pip fetches, builds or
# installs (with `all`, each line), and now and then that the step is still at work.
progress() {
  local step=$1 line code began=$SECONDS number=0
  while true; do
    code=0
    IFS= read -r -t "${SETUP_BEAT_S:-20}" line || code=$?
    if [ "$code" -gt 128 ]; then
      say "  still $step ($((SECONDS - began)) s)"
      continue
    fi
    case $line in
      "Collecting "* | "Processing "*)
        number=$((number + 1)) line=${line%% (from *}; say "  package $number: ${line##*[ /]}" ;;
      *"Building wheel for "*started | *"Building editable for "*started)
        step="building ${line#*for }" step=${step%% (*}; say "  $step" ;;
      "Installing collected packages: "*)
        step="installing"; say "  installing ${line#*: }" ;;
      *) [ -z "${2:-}" ] || [ -z "$line" ] || say "  $line" ;;
    esac
    [ "$code" = 0 ] || return 0
  done
}
install() { "${pip[@]}" "$@" | progress "fetching packages"; }

case $here in
  *[[:space:]\'\"\$\;\&]*)
    die "the path '${here%/*}' holds a character that torch's builder of extensions does not quote;" \
      "move the checkout to a folder without blanks or quotes (results may lie anywhere)" ;;
esac
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
  die "PYTHON=$python is $("$python" -V 2>&1); Python 3.11 to 3.13 is needed: make setup PYTHON=python3.12"
command -v "${CXX:-c++}" >/dev/null ||
  die "no C++ compiler (${CXX:-c++}); DeepSpeed's CPUAdam and our kernel need one: install g++"

if [ -n "${WHEELHOUSE:-}" ]; then
  [ -d "$WHEELHOUSE" ] || die "WHEELHOUSE=$WHEELHOUSE is not a folder"
  pip+=(--no-index --find-links "$WHEELHOUSE")
fi
if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
  "$python" -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert v >= (2, 11), v' ||
    die "USE_OWN_TORCH=1, but $python has no torch >= 2.11, which the harness needs"
fi

say "environment in $venv (minutes, once)"
"$python" -m venv "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
  # Not --system-site-packages: that reaches past an environment to the interpreter it was made from.
  "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$packages/own.pth"
else
  install "torch==${TORCH_VERSION:-2.13.0}" "$(grep '^numpy==' "$here/run.txt")"
fi
install "setuptools>=77" wheel

install_from() {
  local wanted="$packages/wanted.txt"
  if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
    # What is there is kept as it is: whoever put it there matched it to that torch.
    "$venv/bin/python" "$here/pins.py" --lacking "$1" >"$wanted"
  else
    grep -v '^#' "$1" >"$wanted"
  fi
  if deepspeed=$(grep '^deepspeed==' "$wanted"); then
    # Published as source; its setup imports torch, so it is built in this environment.
    DS_BUILD_OPS=0 install --no-build-isolation "$deepspeed"
  fi
  if [ -s "$wanted" ]; then install -r "$wanted"; fi
}
say "packages of ${here##*/}/run.txt"
install_from "$here/run.txt"
say "packages of ${here##*/}/dev.txt"
if ! install_from "$here/dev.txt"; then
  [ -n "${WHEELHOUSE:-}" ] || die "the tests' packages could not be installed"
  say "the tests' packages are not in $WHEELHOUSE: the main job will run, make test will not"
fi
if command -v nvidia-smi >/dev/null && ! install_from "$here/gpu.txt"; then
  say "nvidia-ml-py could not be installed: GPUs will not be sampled while runs last"
fi
install --no-build-isolation --no-deps -e "$here/.."

say "building the compiled ops into $TORCH_EXTENSIONS_DIR"
# With the environment's own ninja: DeepSpeed builds again when it meets another one.
PATH=$(cd "$venv/bin" && pwd):$PATH PYTHONUNBUFFERED=1 \
  "$venv/bin/python" -W ignore -m deep_optimizer_states.build 2>&1 | progress "building ops" all
say "ready"
