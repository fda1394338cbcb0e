#!/bin/sh
# Profile and plan the three jobs of this folder on 1,024 H100s, without a device: run.sh [FOLDER]
set -e
cd "$(dirname "$0")"
out=${1:-.}
export TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore
profile() {
    megatron-autorecompute profile --no-device --gpu h100-80gb "$1.yaml" -o "$out/$1.json" > "$out/$1.txt"
}
plan() {
    name=$1
    shift
    megatron-autorecompute plan --profile "$out/$name.json" --budget-gib 73.14 "$@" |
        sed '/^Assumes/,/^Add to/{/^Add to/!d}'
}
profile llama3-70b
plan llama3-70b --pp 4 --vp 5 --num-microbatches 8
profile llama31-405b
plan llama31-405b --pp 8 --vp 8 --num-microbatches 32 \
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
profile deepseek-v3
plan deepseek-v3 --pp 8 --vp 4 --num-microbatches 256 \
    --pipeline-model-parallel-layout "Et|(tt|)*30mL"
