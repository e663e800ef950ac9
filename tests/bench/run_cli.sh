#!/usr/bin/env bash
# The front door on a machine with GPUs, from a checkout that is not installed: run_cli.sh [MODEL]
# Plans for this machine, trains on this checkout's own text, verifies, refuses a plan for another number of GPUs.
set -u
shim=$(mktemp -d)
mkdir "$shim/zplan"
ln -s "$PWD"/zplan/*.py "$PWD/planner" "$PWD/runtime" "$PWD/cuda_ops" "$shim/zplan/"
export PYTHONPATH="$shim:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
model=${1:-smollm2-135m}
work=$(mktemp -d)
mkdir "$work/text"
for f in docs/*.md runtime/*.py planner/*.py; do cp "$f" "$work/text/$(basename "$f").txt"; done
cd "$work" || exit 1
zplan() {
    echo "\$ zplan $*"
    python3 -m zplan "$@"
    echo "exit code $?"
}
zplan plan --model "$model" --stage 3 --seq 1024 --micro-batch 4 -o plan.json
zplan run plan.json --data text --steps 5
zplan verify plan.json
zplan verify plan.json --world 8 --cap 24GiB
zplan plan --model "$model" --gpus 16 --mem 24 --seq 1024 -o wide.json > wide.txt
zplan run wide.json --data text
zplan demo --steps 20
