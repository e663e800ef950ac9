#!/usr/bin/env bash
# Run one of the GPU scripts from a checkout that is not installed: run_gpu.sh NPROC SCRIPT ARGS... NPROC 0: without torchrun.
set -u
shim=$(mktemp -d)
mkdir "$shim/zplan"
ln -s "$PWD"/zplan/*.py "$PWD/planner" "$PWD/runtime" "$PWD/cuda_ops" "$shim/zplan/"
export PYTHONPATH="$shim:${PYTHONPATH:-}" PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1
nproc=$1
shift
if [ "$nproc" = 0 ] && [ "$1" = pytest ]; then
    exec python3 -P -m "$@"  # -P: the checkout's bare folder zplan would hide the package
elif [ "$nproc" = 0 ]; then
    exec python3 "$@"
fi
python3 -m torch.distributed.run --standalone --nproc-per-node "$nproc" "$@"
