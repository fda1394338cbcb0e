"""The examples of planning without a device, as `make examples` runs them."""

from dataclasses import replace

import pytest

from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile
from tests.support import EXAMPLE_JOBS, EXAMPLES


@pytest.mark.parametrize("name", EXAMPLE_JOBS)
def test_a_profile_that_the_package_carries_is_what_estimate_makes(name, examples):
    carried = Profile.load(EXAMPLES / f"{name}.h100-80gb.json")
    made = Profile.load(examples.folder / f"{name}.json")
    # But for the versions that made it: 0.16.1 and 0.19.2 of megatron-core give the same.
    assert replace(carried, fingerprint=made.fingerprint) == made, "make recorded"


@pytest.mark.parametrize("name", EXAMPLE_JOBS)
def test_examples_take_under_4_gib_and_say_what_to_run_next(name, examples):
    assert examples.largest_bytes < 4 << 30
    out = (examples.folder / f"{name}.txt").read_text()
    assert "modelled, not measured" in out
    asked = load_job(EXAMPLES / f"{name}.yaml")
    path = examples.folder / f"{name}.json"
    assert [stage.layers for stage in Profile.load(path).stages] == [
        tuple(sorted(layer for chunk in chunks for layer in chunk.layers))
        for chunks in asked.layout().stages
    ]
    # What it says to run next is what the script ran.
    planning = out.splitlines()[-1].replace('"', "").split()
    assert planning[:5] == [
        "megatron-autorecompute",
        "plan",
        "--profile",
        str(path),
        "--budget-gib",
    ]
    plan = Plan.load(examples.folder / f"{name}.plan.json")
    assert set(plan.budget_bytes) == {int(float(planning[5]) * (1 << 30))}
    assert plan.step_evidence.gap < 0.01
