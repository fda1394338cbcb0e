#!/usr/bin/env bash
# Profile and plan the jobs of this folder on H100s, without a device. The hybrid ones need core 0.18.
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
    # The budget is what the estimate ends with.
    megatron-autorecompute plan --profile "$out/$1.json" --budget-gib "$(tail -1 "$out/$1.txt" | sed 's/.*--budget-gib //')" \
        -o "$out/$1.plan.json"
}
profile llama3-70b 2>&1
plan llama3-70b
profile llama31-405b 2>&1
plan llama31-405b
profile deepseek-v3 2>&1
plan deepseek-v3
if python -c "import megatron.core.models.hybrid" 2> /dev/null; then
    for job in nemotron-3-nano nemotron-3-super nemotron-h-56b; do
        profile $job 2>&1
        plan $job
    done
fi
