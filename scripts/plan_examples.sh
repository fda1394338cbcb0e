#!/usr/bin/env bash
# Profile and plan the package's examples on H100s, without a device.
#   plan_examples.sh FOLDER [JOB...]    where profiles and plans go; by default all; results are printed
set -euo pipefail
out=$1
mkdir -p "$out"
export TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore
TIMEFORMAT="profiled in %U s of processor time"

gpt=(llama3-70b llama31-405b deepseek-v3 qwen3-30b-a3b-grpo)
hybrid=(llama3-70b-hybrid nemotron-3-nano nemotron-3-super nemotron-h-56b)

profile() {
    time megatron-autorecompute estimate --gpu h100-80gb --example "$1" -o "$out/$1.json" \
        > "$out/$1.txt"
}
plan() {
    # The budget is what the estimate ends with.
    budget_gib=$(tail -1 "$out/$1.txt" | sed -E 's/.*--budget-gib ([0-9.]+) .*/\1/')
    megatron-autorecompute plan --profile "$out/$1.json" --budget-gib "$budget_gib" \
        -o "$out/$1.plan.json"
}
can_run() {
    [[ " ${hybrid[*]} " != *" $1 "* ]] || python -c "import megatron.core.models.hybrid" 2> /dev/null
}

jobs=("${@:2}")
[[ ${#jobs[@]} -gt 0 ]] || jobs=("${gpt[@]}" "${hybrid[@]}")
for job in "${jobs[@]}"; do
    if can_run "$job"; then
        profile "$job" 2>&1
        plan "$job"
    else
        core=$(python -c "import megatron.core; print(megatron.core.__version__)" 2> /dev/null)
        echo "$job was not run: megatron-core $core has no HybridModel, which came with 0.18"
    fi
done
