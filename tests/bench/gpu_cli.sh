#!/usr/bin/env bash
# The whole chain through the command line on a GPU machine, from a checkout that is not installed.
set -u
shim=$(mktemp -d)
mkdir "$shim/zplan"
ln -s "$PWD"/zplan/*.py "$PWD/planner" "$PWD/runtime" "$PWD/cuda_ops" "$shim/zplan/"
export PYTHONPATH="$shim:${PYTHONPATH:-}"
work=$(mktemp -d)
cat "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"/a*.py >"$work/text.txt"
gpus=$(nvidia-smi -L | wc -l)
cd "$work" || exit 1  # from the checkout `-m zplan` would find its bare folder
step() { echo "\$ zplan $*"; timeout 120 python3 -m zplan "$@" 2>&1 | grep -v '^W[0-9]' | tail -"${lines:-12}"; }
lines=6 step plan --model llama-3.2-1b --gpus "$gpus" --seq 1024 --micro-batch 4 -o "$work/plan.json"
lines=36 step run "$work/plan.json" --data "$work/text.txt" --steps 5
lines=8 step verify "$work/plan.json"
lines=6 step plan --model llama-2-7b --gpus 8 --mem 24 --seq 2048 -o "$work/seven.json"
lines=14 step verify "$work/seven.json" --world 8 --cap 24GiB
lines=12 step verify "$work/seven.json" --world 8 --cap 14GiB
lines=6 step plan --model gpt2-xl --gpus "$gpus" --seq 1024 --stage 2 --micro-batch 2 --global-batch $((gpus * 4)) -o "$work/g.json"
lines=12 step verify "$work/g.json"
