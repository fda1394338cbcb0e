"""What a policy that stands still costs: Python calls of one training step, counted.

The same model, data and step run without this package, under Megatron's own setting, under an equal
policy, and under the plan that `auto` has settled on. Every call of a Python function in the step
is counted by the file and name of the function, so that the difference is exact.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

import megatron_autorecompute
from megatron_autorecompute.compare.comparison import Shape
from testing.ranks import run_ranks

pytestmark = pytest.mark.newest_version

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
OURS = str(Path(megatron_autorecompute.__file__).parent)
LAYERS, MICROBATCHES, STEPS = 6, 3, 20
SHAPE = Shape(
    num_layers=LAYERS,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=32,
    num_microbatches=MICROBATCHES,
    pipeline_stages=1,
)
STRATEGIES = {
    "none": {},
    "megatron:selective[core_attn]": {"recompute_granularity": "selective"},
    "megatron:block/2": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "megatron:uniform/2": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
}
RUNS = {"full*2,none*2,full*2": 3, "full*1,none*1,full*1,none*1,full*1,none*1": 6}
"""Policies that Megatron has no setting for, and their runs of equal layers."""
PARTS = {
    "full": ("full+all", 95),
    "full+keep[core_attn]": ("full", 175),
    "selective[mlp]": ("selective[mlp]+all", 95),
    "selective[core_attn]": ("selective[core_attn]+all", 260),
}
"""Policies with one part more that runs once than another policy, and calls of it."""


def calls_of(step):
    """(file, function) of every Python function called in `step`, counted."""
    calls = Counter()

    def note(frame, event, _):
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def own(calls, *modules):
    """Those of this package, or of modules of it, by function."""
    files = {module.__file__ for module in modules}
    return Counter(
        {
            (file, name): number
            for (file, name), number in calls.items()
            if (file in files if files else file.startswith(OURS))
        }
    )


def counted():
    """Calls of one step of every job, by name."""
    from megatron.core import parallel_state

    from megatron_autorecompute.compare.workload import TrainingJob, Variant
    from megatron_autorecompute.policy import RecomputePolicy
    from megatron_autorecompute.runtime.apply import apply

    parallel_state.initialize_model_parallel()
    found = {}
    for policy, settings in STRATEGIES.items():
        found[f"Megatron's {policy}"] = settled(TrainingJob(SHAPE, TEXT, Variant(settings)))
    without = [policy for policy, _ in PARTS.values()]
    for policy in (*STRATEGIES, *RUNS, *PARTS, *without):
        job = TrainingJob(SHAPE, TEXT)
        layout = [list(range(LAYERS))]
        parsed = RecomputePolicy.parse(policy, num_layers=LAYERS, layout=layout)
        with apply(parsed, job.chunks):
            found[policy] = settled(job)
    found["auto"], found["auto's policy"] = auto_calls(TrainingJob(SHAPE, TEXT))
    return found


def settled(job):
    for _ in range(2):  # the first steps allocate what stays
        job.step()
    return calls_of(job.step)


def auto_calls(job):
    """Calls of a step that `auto` only watches, and of the same step without `auto` around it."""
    from megatron_autorecompute.profile import Parallelism
    from megatron_autorecompute.runtime.auto_options import AutoOptions
    from megatron_autorecompute.runtime.controller import Auto, JobFacts

    facts = JobFacts(
        Parallelism(SHAPE.micro_batch_size, SHAPE.seq_length, dtype="float32"),
        lambda: MICROBATCHES,
        lambda _: None,
        without_cuda=True,
    )
    options = AutoOptions(recompute_memory_budget_gib=1)
    tuner = Auto(job.chunks, job.optimizer, options, facts)

    def step():
        with tuner.step():
            job.step()

    for _ in range(STEPS):
        step()
    watched = calls_of(step)
    tuner.close()
    return watched, settled(job)


@pytest.fixture(scope="module")
def calls():
    return run_ranks(counted, 1)[0]


def changed(calls, name, than):
    """How many calls `name` has more of, net."""
    return sum(calls[name].values()) - sum(calls[than].values())


def seam_calls(calls):
    """Calls of Megatron's checkpointed forward, which 0.18 made a function of its own."""
    return sum(
        number
        for (file, name), number in calls.items()
        if name.lstrip("_") == "checkpointed_forward" and not file.startswith(OURS)
    )


def test_no_recompute_makes_the_very_calls_of_a_model_without_us(calls):
    assert calls["none"] == calls["Megatron's none"]


@pytest.mark.parametrize("policy", ["megatron:block/2", "megatron:uniform/2"])
def test_a_full_policy_costs_at_most_forty_calls_a_microbatch_more_than_megatrons_own(
    calls, policy
):
    # Copies of the block and of its config.
    assert changed(calls, policy, f"Megatron's {policy}") <= 40 * MICROBATCHES


def test_a_selective_policy_costs_one_hook_a_layer(calls):
    # A look at the layer's input, and the calls torch makes around a hook with keywords.
    from megatron_autorecompute.runtime import apply

    same = "megatron:selective[core_attn]"
    more = changed(calls, same, f"Megatron's {same}")
    assert own(calls[same], apply).total() <= 3 * LAYERS * MICROBATCHES
    assert more <= 8 * LAYERS * MICROBATCHES


@pytest.mark.parametrize("policy", RUNS)
def test_every_run_of_equal_layers_is_one_call_of_megatrons_function(calls, policy):
    assert seam_calls(calls[policy]) == RUNS[policy] * MICROBATCHES
    assert seam_calls(calls["none"]) == 0


@pytest.mark.parametrize("policy", PARTS)
def test_a_part_that_runs_once_costs_a_bounded_number_of_calls(calls, policy):
    # For each layer and microbatch. An unfused attention's product is found by looking at every
    # function of torch that the attention calls.
    without, most = PARTS[policy]
    assert changed(calls, policy, without) <= most * LAYERS * MICROBATCHES


def test_auto_costs_a_handful_of_calls_a_step_once_its_plan_stands(calls):
    from megatron_autorecompute.runtime import live_bytes, measurement, measuring, probe

    ours = own(calls["auto"]) - own(calls["auto's policy"])
    assert ours.total() <= 60, ours
    assert changed(calls, "auto", "auto's policy") <= 137
    assert not own(calls["auto"], live_bytes, measurement, measuring, probe)
