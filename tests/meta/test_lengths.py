"""Jobs whose microbatches differ in length, without a device."""

import json

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import OptionError, VerificationError
from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.lengths import packed, simulated
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.verify import StageCheck, calls_of, require_verified
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.lengths import profile_at
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.buckets import bucket_plans
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.profile import LayerBytes
from tests.hybrid_models import HAVE_HYBRID

H100 = device("h100-80gb")
JOB = {
    "name": "small",
    "num_gpus": 4,
    "seq_length": 1024,
    "global_batch_size": 32,
    "vocab_size": 512,
    "config": {
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 8,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    },
}
HYBRID = {
    **JOB["config"],
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "hybrid_layer_pattern": "M*-G",
    "mamba_head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4,
}
FUSED = {**JOB, "config": HYBRID} if HAVE_HYBRID else JOB
"""A HybridModel where Megatron has it; all but its MLP take packed samples."""
MIXED = {"max_tokens_per_microbatch": 1024, "sample_lengths": {"128": 0.9, "1024": 0.1}}
PACKED = {**JOB, **MIXED}


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("asked", "above"),
    [
        (FUSED, 0.01),
        pytest.param({**JOB, "transformer_impl": "local"}, 0.08, marks=pytest.mark.any_version),
    ],
    ids=["fused", "unfused"],
)
def test_lines_give_what_profiling_at_another_length_gives(asked, above, tmp_path, capsys):
    """Unfused attention (local) has tensors of length x length, so that the highest moment of a
    layer is another one in long microbatches: the envelope lies above both."""
    whole = profile_job(job_from({**asked, **MIXED}, "job"), H100)
    there = profile_job(job_from({**asked, "seq_length": 640}, "job"), H100)
    here = profile_at(whole, Microbatch.longest(640), 0)
    assert here.boundary_bytes == there.boundary_bytes
    for moved, own in zip(here.kinds, there.kinds, strict=True):
        for a, b in zip(moved.choices, own.choices, strict=True):
            found, right = LayerBytes.of(a), LayerBytes.of(b)
            assert a.choice == b.choice
            assert found.held_bytes == pytest.approx(right.held_bytes, rel=1e-3)
            for figure in ("forward_transient_bytes", "backward_transient_bytes"):
                size = getattr(right, figure) + right.held_bytes
                level = getattr(found, figure) + found.held_bytes
                assert 0.999 * size <= level <= (1 + above) * size
    if asked is FUSED:
        _buckets_save_where_calls_are_short(whole)
        _megatron_runs_calls_as_predicted(whole, tmp_path, capsys)


def _buckets_save_where_calls_are_short(profile):
    job = job_from(JOB, "job")
    problem = Problem(profile, job.layout(), job.schedule())
    lean = max(choice.peak_bytes for choice in problem.stages.leanest)
    full = max(choice.peak_bytes for choice in problem.stages.fastest)
    found = bucket_plans(problem.at((lean + full) // 2))
    assert [plan.tokens for plan in found] == [256, 384, 512, 768, 1024]
    assert sum(plan.share for plan in found) == pytest.approx(1)
    assert found[-1].policy == solve(problem.at((lean + full) // 2)).policy.format()
    assert found[0].saved > 0
    assert found[-1].saved == 0
    none_fits = bucket_plans(problem.at(lean - 1))
    assert none_fits[-1].policy is None


def _megatron_runs_calls_as_predicted(profile, tmp_path, capsys):
    """Interleaved: three microbatches are run as four, the longest in halves."""
    problem = Problem(profile, Layout.from_flags(4, 2, 2), Schedule(2, 2, 4))
    fits = max(choice.peak_bytes for choice in problem.stages.fastest)
    plan = make_plan(problem.at(fits))
    assert len(calls_of(plan)) == 3
    assert list(calls_of(plan)[0]) == sorted(calls_of(plan)[0], reverse=True)
    plan.save(tmp_path / "plan.json")
    words = ["verify", str(tmp_path / "plan.json"), "--json"]
    assert main([*words, "--lengths", "256,1024,640", "--lengths", "768,4096,128,512"]) == 10
    printed = capsys.readouterr()
    assert "its budget is" in printed.err  # 4096 tokens are four times what the plan is for
    rows = json.loads(printed.out)
    assert [(row["step"], row["stage"]) for row in rows] == [
        *(("plan", 0), ("plan", 1)),
        *(("call 1", 0), ("call 1", 1)),
        *(("call 2", 0), ("call 2", 1)),
    ]
    assert rows[2]["lengths"] == [256, 512, 512, 640]
    for row, own in zip(rows[2:4], rows[:2], strict=True):
        assert row["megatron_bytes"] <= row["bound_bytes"] == own["megatron_bytes"]
    boundary = profile.boundary_bytes  # counted twice in places, as in calls of one length
    for row in rows:
        longest = max(row["lengths"], default=1024)
        too_high = row["predicted_bytes"] - row["megatron_bytes"]
        assert -64 <= too_high <= boundary * longest / 1024  # a few numbers, as the loss
    assert rows[4]["bound_bytes"] is None


def test_a_call_above_its_bound_or_its_prediction_is_an_error():
    sizes = {"static_bytes": 0, "budget_bytes": 2000, "step": "call 1", "lengths": (3, 1)}
    require_verified([StageCheck(0, 1100, 1000, bound_bytes=1000, **sizes)])
    for predicted, bound, says in (
        (1100, 999, "exceed the plan's own peak"),
        (990, 1000, "-1.0%"),
    ):
        check = StageCheck(0, predicted, 1000, bound_bytes=bound, **sizes)
        with pytest.raises(VerificationError, match=says):
            require_verified([check])


@pytest.mark.parametrize("most", [4, 9])
def test_microbatches_are_full_and_not_above_the_cap_but_for_samples_that_are(most):
    samples = [3, 1, 4, 1, 5, 9, 2, 6]
    found = packed(samples, most)
    assert sum(found) == sum(samples)
    assert all(size <= most or size in samples for size in found)
    # First fit: no two of them would fit into one.
    smallest, next_one, *_ = sorted(found)
    assert smallest + next_one > most


def test_calls_are_simulated_over_all_data_parallel_ranks():
    calls = simulated(job_from(PACKED, "job"))
    assert sum(calls.shares.values()) == pytest.approx(1)
    assert calls.shares[1024] > 0.9  # the largest microbatch of two ranks is nearly full
    assert 2 <= calls.num_microbatches <= 16
    assert all(
        len(each) in (calls.num_microbatches + n for n in range(-3, 4)) for each in calls.examples
    )


def test_lengths_come_from_a_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"length": 1024}\n100\n')
    calls = simulated(job_from({**PACKED, "sample_lengths": str(path)}, "job"))
    assert 1024 in calls.shares
    path.write_text('{"tokens": 3}\n')
    with pytest.raises(OptionError, match="has no length"):
        simulated(job_from({**PACKED, "sample_lengths": str(path)}, "job"))
    path.write_text("\n")
    with pytest.raises(OptionError, match="no line has a length"):
        simulated(job_from({**PACKED, "sample_lengths": str(path)}, "job"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_tokens_per_microbatch": 0}, "without max_tokens_per_microbatch"),
        ({"sample_lengths": [2048]}, "Raise seq_length"),
        ({"max_tokens_per_microbatch": 1000}, "up to 1,024 tokens, and a microbatch up to 1,000"),
        ({"sample_lengths": {"x": 1.0}}, "sample_lengths"),
        ({"sample_lengths": "nowhere.jsonl"}, "Cannot read sample_lengths"),
    ],
)
def test_wrong_lengths_are_refused(changed, says):
    with pytest.raises(OptionError, match=says):
        simulated(job_from({**PACKED, **changed}, "job"))
