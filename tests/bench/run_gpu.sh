#!/usr/bin/env bash
# Run one of the GPU scripts from a checkout that is not installed: run_gpu.sh NPROC SCRIPT ARGS...
set -u
shim=$(mktemp -d)
mkdir "$shim/zplan"
ln -s "$PWD"/zplan/*.py "$PWD/planner" "$PWD/runtime" "$PWD/cuda_ops" "$shim/zplan/"
export PYTHONPATH="$shim:${PYTHONPATH:-}" PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1
nproc=$1
shift
python3 -m torch.distributed.run --standalone --nproc-per-node "$nproc" "$@"
