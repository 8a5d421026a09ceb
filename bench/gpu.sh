#!/bin/sh
# What only a GPU shows of a step, GPU tests, GPU benchmarks, with PyTorch and nothing else: no network, no installs.
#
#   sh bench/gpu.sh OUT              within 6 minutes; raw JSON, logs and summary.md in the folder OUT
#   sh bench/gpu.sh OUT --dry-run    the same path on a CPU with gloo and tiny models, in about a minute
#   sh bench/gpu.sh OUT --resume     6 minutes more: what failed or found no time
#   sh bench/gpu.sh OUT --only step  pieces by the beginnings of their names, several separated by commas
#   sh bench/gpu.sh OUT --layers 10  fewer layers of the 8B model whose longest context is searched
#
# To keep the figures: copy OUT/figures.json to bench/results/gpu-MACHINE.json and run `python -m bench report`.
set -eu
[ $# -ge 1 ] || { sed -n 2,10p "$0"; exit 2; }
case $1 in /*) out=$1 ;; *) out=$PWD/$1 ;; esac
shift
cd "$(dirname "$0")/.."
for package in packages/*/src; do
    PYTHONPATH=$PWD/$package${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m bench gpu "$out" "$@"
