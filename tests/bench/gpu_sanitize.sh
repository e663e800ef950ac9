#!/usr/bin/env bash
# The kernels under compute-sanitizer, on a small run of each check: gpu_sanitize.sh [TOOL...]
#
# What cuda-core asks the driver for and does not get are API errors of no interest: it probes for versions.
set -u
shim=$(mktemp -d)
mkdir "$shim/zplan"
ln -s "$PWD"/zplan/*.py "$PWD/planner" "$PWD/runtime" "$PWD/cuda_ops" "$shim/zplan/"
export PYTHONPATH="$shim:${PYTHONPATH:-}" OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Those of ours in which threads share memory; racecheck would take minutes for torch's.
ours=(adamw square_sum total_sum sum_grads cross_entropy rms_norm)
bad=0
for tool in ${*:-memcheck racecheck initcheck}; do
    start=$SECONDS
    echo "== $tool"
    only=()
    [ "$tool" != racecheck ] || only=("${ours[@]/#/--kernel-regex=kns=}")
    timeout 100 compute-sanitizer --report-api-errors no --tool "$tool" "${only[@]}" --error-exitcode 9 \
        python3 tests/bench/gpu_tiny.py "$tool" 2>&1 | tail -n 40
    status=${PIPESTATUS[0]}
    echo "== $tool: exit status $status after $((SECONDS - start)) s"
    [ "$status" = 0 ] || bad=1
done
exit $bad
