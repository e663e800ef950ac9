#!/usr/bin/env bash
# Run one of the GPU scripts from a checkout that is not installed: run_gpu.sh NPROC SCRIPT ARGS... NPROC 0: without torchrun.
# ONE_GPU=LIBNCCL puts all ranks on the first GPU, for checks and not for times; LIBNCCL: libnccl.so.2 of NCCL 2.30 or newer.
set -u
shim=$(mktemp -d)
mkdir "$shim/zplan"
ln -s "$PWD"/zplan/*.py "$PWD/planner" "$PWD/runtime" "$PWD/cuda_ops" "$shim/zplan/"
export PYTHONPATH="$shim:${PYTHONPATH:-}" PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1
if [ -n "${ONE_GPU:-}" ]; then
    export NCCL_MULTI_RANK_GPU_ENABLE=1 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 LD_PRELOAD="$ONE_GPU"
    export PYTHONPATH="$PWD/tests/bench/one_gpu:$PYTHONPATH"
fi
nproc=$1
shift
if [ "$nproc" = 0 ] && [ "$1" = pytest ]; then
    exec python3 -P -m "$@"  # -P: the checkout's bare folder zplan would hide the package
elif [ "$nproc" = 0 ]; then
    exec python3 "$@"
fi
python3 -m torch.distributed.run --standalone --nproc-per-node "$nproc" "$@"
