#!/usr/bin/env bash
# Fills a folder with wheels for an x86-64 Linux machine without a network:
#   requirements/wheelhouse.sh DIR [--python 3.12] [--torch | --lean]
#   --python V  the other machine's Python (3.12)
#   --torch     also torch with its CUDA packages, some gigabytes; otherwise that machine has a torch
#   --lean      only what `make gpu-check` needs and a machine with torch and NumPy may lack, to be
#               carried over a narrow way
# There: make setup WHEELHOUSE=DIR [USE_OWN_TORCH=1], or make gpu-check ARGS="--wheels DIR".
# Read from the environment: PYTHON (python3), TORCH_VERSION (what setup.sh installs).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} target=3.12 with_torch=0 lean=0 dir=

die() { printf 'wheelhouse: %s\n' "$*" >&2; exit 2; }

while [ $# -gt 0 ]; do
  case $1 in
    --python) target=${2:?--python needs a version such as 3.12}; shift ;;
    --torch) with_torch=1 ;;
    --lean) lean=1 ;;
    -*) die "unknown option $1; known: --python, --torch, --lean" ;;
    *) [ -z "$dir" ] || die "two folders, $dir and $1; give one"; dir=$1 ;;
  esac
  shift
done
[ -n "$dir" ] || die "give the folder to fill: requirements/wheelhouse.sh DIR [--python 3.12] [--torch | --lean]"
case $target in
  3.11 | 3.12 | 3.13) ;;
  *) die "--python $target: give 3.11, 3.12 or 3.13" ;;
esac
[ "$with_torch$lean" != 11 ] || die "--torch and --lean exclude each other; give one of them"

mkdir -p "$dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
# pip asks the Python that runs it for markers, not the one that wheels are fetched for.
pins() { "$python" "$here/pins.py" --python "$target" "$@"; }
pins "$here"/run.txt "$here"/dev.txt >"$work/pins.txt"
pinned() { grep -E "^$1==" "$work/pins.txt"; }
torch_version=${TORCH_VERSION:-$(sed -n 's/.*TORCH_VERSION:-\([0-9.]*\)}.*/\1/p' "$here/setup.sh" | head -1)}

if [ "$lean" = 1 ]; then
  for name in megatron-core pydantic charset-normalizer tokenizers pytest pytest-timeout hypothesis \
    tiktoken; do
    pinned "$name"
  done
else
  pins "$here"/run.txt "$here"/dev.txt "$here"/gpu.txt "$here"/uv.txt | grep -v '^deepspeed=='
  printf 'setuptools>=77\nwheel\n'
fi >"$work/wanted.txt"

# Other packages require what the other machine has. A wheel without content stands in for it, so
# that pip downloads neither it nor what only it needs.
stand_in() {
  echo "$1==$2+there" >>"$work/wanted.txt"
  "$python" - "$work" "$1" "$2+there" <<'PY'
import sys, zipfile
folder, name, version = sys.argv[1:]
name = name.replace("-", "_")  # a dash ends the name in a wheel's
info = f"{name}-{version}.dist-info"
with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as wheel:
    wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", "")
PY
}
if [ "$with_torch" = 1 ]; then
  echo "torch==$torch_version" >>"$work/wanted.txt"
else
  stand_in torch "$torch_version"
fi
if [ "$lean" = 1 ]; then
  numpy=$(pinned numpy)
  stand_in numpy "${numpy#numpy==}"
  hub=$(pinned huggingface-hub)  # which tokenizers asks for, and needs for downloads alone
  stand_in huggingface-hub "${hub#huggingface-hub==}"
fi

# Published as source alone, and pure Python, so that one wheel serves every Python. DeepSpeed is so
# without its compiled ops, which are compiled on the other machine.
sources=(deepspeed)
[ "$lean" = 1 ] || sources+=(rouge-score sqlitedict word2number)
for name in "${sources[@]}"; do
  DS_BUILD_OPS=0 pip wheel -q --no-deps -w "$work" "$(pinned "$name")"
done
cp "$work"/deepspeed-*.whl "$dir"

# pip takes a wheel only for exactly the glibc versions that are named.
platforms=(--platform any --platform manylinux1_x86_64 --platform manylinux2010_x86_64
  --platform manylinux2014_x86_64)
for minor in $(seq 5 39); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
pip download -q --only-binary=:all: --python-version "$target" --implementation cp "${platforms[@]}" \
  --find-links "$work" -d "$dir" -r "$work/wanted.txt" "$(pinned deepspeed)"
rm -f "$dir"/*+there-py3-none-any.whl
printf 'wheelhouse: %s wheels for Python %s, %s, in %s\n' \
  "$(find "$dir" -name '*.whl' | wc -l)" "$target" "$(du -sh "$dir" | cut -f1)" "$dir" >&2
