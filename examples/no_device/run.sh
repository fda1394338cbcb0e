#!/usr/bin/env bash
# Profile and plan the three jobs of this folder on 1,024 H100s, without a device.
#   run.sh [FOLDER]    where profiles and plans go; results are printed
set -euo pipefail
out=$(mkdir -p "${1:-.}" && cd "${1:-.}" && pwd)
cd "$(dirname "$0")"
export TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore
TIMEFORMAT="profiled in %U s of processor time"

profile() {
    time megatron-autorecompute estimate --gpu h100-80gb "$1.yaml" -o "$out/$1.json" \
        > "$out/$1.txt"
}
plan() {
    local name=$1
    shift
    megatron-autorecompute plan --profile "$out/$name.json" --budget-gib 73.14 "$@" \
        -o "$out/$name.plan.json" | sed '/^Assumes/,/^Add to/{/^Add to/!d}'
}
profile llama3-70b 2>&1
plan llama3-70b --pp 4 --vp 5 --num-microbatches 8
profile llama31-405b 2>&1
plan llama31-405b --pp 8 --vp 8 --num-microbatches 32 \
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
profile deepseek-v3 2>&1
plan deepseek-v3 --pp 8 --vp 4 --num-microbatches 256 \
    --pipeline-model-parallel-layout "Et|(tt|)*30mL"
