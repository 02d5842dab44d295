#!/usr/bin/env bash
# Builds the environment in the folder given: pinned packages, and the compiled ops meanwhile.
#   setup.sh VENV        what the harness runs with (run.txt)
#   setup.sh VENV tests  on top of it what tests and checks need (dev.txt)
# uv installs, as pip is configured to; pip does where uv is not to be had, and says why.
# Read from the environment:
#   PYTHON            interpreter to build with (python3)
#   USE_OWN_TORCH=1   take torch and what else PYTHON's environment has, install only what is missing
#   WHEELHOUSE=DIR    install from the wheels in DIR alone, without a network
#   TORCH_VERSION     torch to install (2.13.0)
#   INSTALLER=pip     do not use uv
#   MAX_JOBS          compilers at a time (as many as there are cores)
set -euo pipefail
venv=${1:?usage: setup.sh VENV [tests]}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
# make puts the environment's own programs first; what it is built with must not lie in it.
own=$(realpath -m "$venv")/bin
while [[ :$PATH: == *":$own:"* ]]; do PATH=:$PATH: PATH=${PATH/":$own:"/:} PATH=${PATH#:} PATH=${PATH%:}; done
build='' # process group that compiles

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

case $here in
  *[[:space:]\'\"\$\;\&]*)
    die "the path '${here%/*}' holds a character that torch's builder of extensions does not quote;" \
      "move the checkout to a folder without blanks or quotes (results may lie anywhere)" ;;
esac
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
  die "PYTHON=$python is $("$python" -V 2>&1); Python 3.11 to 3.13 is needed: make setup PYTHON=python3.12"
command -v "${CXX:-c++}" >/dev/null ||
  die "no C++ compiler (${CXX:-c++}); DeepSpeed's CPUAdam and our kernel need one: install g++"
[ -z "${WHEELHOUSE:-}" ] || [ -d "$WHEELHOUSE" ] || die "WHEELHOUSE=$WHEELHOUSE is not a folder"
if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
  "$python" -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert v >= (2, 11), v' ||
    die "USE_OWN_TORCH=1, but $python has no torch >= 2.11, which the harness needs"
fi

# One set-up at a time. The folder itself is locked, so that nothing is left behind.
mkdir -p "$venv"
exec 9<"$venv"
if command -v flock >/dev/null && ! flock -n 9; then
  say "another set-up is at work in $venv; waiting for it"
  flock 9
fi

mark=$venv/.unfinished # stays where an installer or a compiler was cut off
contents=()
for path in "$venv"/* "$venv"/.[!.]*; do
  # An environment may lie inside another one (docs/install.md).
  [ ! -e "$path" ] || [ "$path" = "$mark" ] || [ -e "$path/pyvenv.cfg" ] || contents+=("$path")
done
# What a set-up leaves that is cut off is removed by the next one: nothing else may lie there.
if [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$mark" ] && [ "${#contents[@]}" != 0 ]; then
  die "$venv has files and is no environment of Python: remove them, or name another folder"
fi
leave() {
  local code=$?
  trap '' INT TERM HUP
  stop_build
  [ "$code" -gt 128 ] || rm -f "$mark"
  exit "$code"
}
stop_build() {
  [ -n "$build" ] || return 0
  kill -TERM -- "-$build" 2>/dev/null || true
  wait "$build" || true
  # Nobody else builds into an environment that is not ready.
  find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2>/dev/null || true
}
if [ -e "$mark" ]; then
  say "the last set-up of $venv was cut off: it begins anew"
  [ "${#contents[@]}" = 0 ] || rm -rf "${contents[@]}"
fi
: >"$mark"
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

choose_installer() {
  installer=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile)
  local uv=$venv/uv/bin/uv why='' pin
  pin=$(grep -v '^#' "$here/uv.txt")
  if [ "${INSTALLER:-uv}" = pip ]; then
    why="INSTALLER=pip"
  elif [ "${USE_OWN_TORCH:-0}" = 1 ]; then
    why="uv does not see what $python has"
  elif ! why=$("$venv/bin/python" "$here/uv_command.py" "$uv" "$venv/bin/python" 2>&1 >"$venv/uv-command"); then
    why=${why:-"pip's configuration cannot be read"}
  elif [ "$("$uv" --version 2>/dev/null | cut -d' ' -f1,2)" != "${pin/==/ }" ] &&
    ! "${installer[@]}" "${from[@]}" --quiet --upgrade --target "$venv/uv" "$pin" >&2; then
    why="$pin is not to be had"
  fi
  if [ -n "$why" ]; then
    say "pip installs, since $why"
  else
    mapfile -d '' installer <"$venv/uv-command"
    say "$pin installs"
  fi
  installer+=("${from[@]}")
}
install() { "${installer[@]}" "$@" >&2 || failed $? "the packages could not be installed, see above"; }
failed() { [ "$1" -le 128 ] || exit "$1"; die "${@:2}"; }

# Pins of some files; of those that lie in PYTHON's environment none, whatever their version:
# whoever put them there matched them to that torch.
pins_of() {
  local files=("${@/#/$here/}")
  if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
    "$venv/bin/python" "$here/pins.py" --lacking "${files[@]}"
  else
    grep -hv '^#' "${files[@]}"
  fi
}
check_pins() {
  [ "${USE_OWN_TORCH:-0}" != 1 ] || return 0
  local wrong
  wrong=$("$venv/bin/python" "$here/pins.py" --differing "${@/#/$here/}")
  [ -z "$wrong" ] || die "not installed as pinned: ${wrong//$'\n'/, }"
}

# Of several indexes uv takes a version from the first that has it, although another one may have a
# wheel of it that is made for this Python; pip takes that.
replace_wheels_of_other_pythons() {
  local others
  mapfile -t others < <("$venv/bin/python" "$here/other_wheels.py")
  [ "${#others[@]}" -gt 0 ] || return 0
  say "pip installs ${others[*]} anew, for a wheel that is made for this Python"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps \
    --force-reinstall "${from[@]}" "${others[@]}" >&2 ||
    failed $? "the packages could not be installed, see above"
}

# Python compiles a module when it first imports it, and no installer is asked to do so for all:
# what the main job imports takes six seconds, everything takes a minute.
import_once() {
  local said modules="deepspeed, torch._dynamo, megatron.core.datasets.gpt_dataset"
  modules+=", megatron.core.models.gpt.gpt_layer_specs, launch.train_loop.deepspeed_adapter"
  modules+=", launch.sweep, parse.report, plots.__main__"
  said=$(PYTHONPATH=$here/.. "$venv/bin/python" -W ignore -c "import $modules" 2>&1) ||
    failed $? "what was installed cannot be imported: $said"
}

start_build() {
  # A process group of its own, so that all of it can be ended; jobs of scripts ignore Ctrl-C.
  set -m
  # With the environment's own ninja: DeepSpeed builds again when it meets another one.
  PATH=$(cd "$venv/bin" && pwd):$PATH MAX_JOBS=${MAX_JOBS:-$(nproc)} PYTHONUNBUFFERED=1 \
    PYTHONPATH=$here/../src \
    "$venv/bin/python" -W ignore -m deep_optimizer_states.build >"$venv/build.log" 2>&1 </dev/null &
  build=$!
  set +m
}
# Shows what the compilers have said, and goes on until they are done. Without a GPU DeepSpeed says
# that it found none, which is no news here.
await_build() {
  local code=0
  tail -n +1 -s 0.2 -f --pid="$build" "$venv/build.log" |
    { grep --line-buffered -v 'Setting accelerator to CPU' || true; } >&2
  wait "$build" || code=$?
  build=''
  [ "$code" = 0 ] || die "the ops could not be compiled, see above"
}

set_up_run() {
  local first=("setuptools>=77" wheel) deepspeed
  if [ "${USE_OWN_TORCH:-0}" = 1 ]; then
    # Not --system-site-packages: that reaches past an environment to the interpreter it was made from.
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$packages/own.pth"
  else
    first+=("torch==${TORCH_VERSION:-2.13.0}")
  fi
  pins_of run.txt >"$wanted"
  mapfile -t -O ${#first[@]} first < <(grep -E '^(numpy|ninja)==' "$wanted")
  say "1 of 4: torch, and what compiles"
  install -c "$wanted" "${first[@]}"
  if deepspeed=$(grep '^deepspeed==' "$wanted"); then
    say "2 of 4: DeepSpeed, which is published as source and whose setup imports torch"
    DS_BUILD_OPS=0 install --no-build-isolation -c "$wanted" "$deepspeed"
  fi
  say "3 of 4: the packages of run.txt; compilers work on the ops meanwhile"
  start_build
  [ ! -s "$wanted" ] || install -r "$wanted"
  install --no-build-isolation --no-deps -e "$here/.."
  if command -v nvidia-smi >/dev/null; then
    pins_of gpu.txt >"$wanted"
    [ ! -s "$wanted" ] || "${installer[@]}" -r "$wanted" >&2 ||
      say "nvidia-ml-py could not be installed: GPUs will not be sampled while runs last"
  fi
  replace_wheels_of_other_pythons
  check_pins run.txt
  import_once
  say "4 of 4: the compiled ops, into $TORCH_EXTENSIONS_DIR (half a minute or more, once)"
  await_build
}

set_up_tests() {
  say "the packages of dev.txt, for tests and checks"
  pins_of run.txt dev.txt >"$wanted"
  [ ! -s "$wanted" ] || install -r "$wanted"
  replace_wheels_of_other_pythons
  check_pins run.txt dev.txt
}

from=()
[ -z "${WHEELHOUSE:-}" ] || from=(--no-index --find-links "$WHEELHOUSE")
parts=("${2:-run}")
if [ ! -x "$venv/bin/python" ] || [ "${2:-run}" = run ]; then
  say "environment in $venv (minutes, once)"
  "$python" -m venv "$venv" || failed $? "$python cannot make an environment in $venv"
  parts=(run ${2:+"$2"})
fi
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wanted=$packages/wanted.txt
choose_installer
for part in "${parts[@]}"; do "set_up_$part"; done
say "ready"
