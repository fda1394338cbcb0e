"""`verify`: the model is built again from a profile's facts, and its plan run on meta tensors."""

import contextlib
import io
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.peak_fidelity import CASES, builder, config, measured_profile, shape
from megatron_autorecompute.cli import main
from megatron_autorecompute.cli.verify import print_row
from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.errors import VerificationError
from megatron_autorecompute.meta import verify
from megatron_autorecompute.meta.meta_step import MOST_WORKERS, workers
from megatron_autorecompute.meta.verify import StageCheck, require_verified
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import layout_text
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    MeasuredStep,
    Profile,
    RankStep,
    StageRecord,
    StaticBytes,
)
from megatron_autorecompute.units import GIB, MIB, unit_for
from testing.ranks import fresh_processes, run_ranks
from tests.default_model import layers
from tests.support import tiny_config

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
SHAPE = Shape(
    num_layers=8, hidden_size=64, num_attention_heads=8, seq_length=128, num_microbatches=2
)
CASE = replace(CASES[0], num_layers=8, pp=2, num_microbatches=4)


def profile_of_a_model() -> Profile:
    """A profile with what a job writes into model.facts."""
    import torch

    from megatron_autorecompute.compat import model_facts
    from megatron_autorecompute.meta import without_cuda
    from megatron_autorecompute.meta.fake_ranks import fake_ranks
    from megatron_autorecompute.meta.meta_step import build_chunks, meta_config

    found = measured_profile(CASE)
    size = shape(CASE, 4)
    with without_cuda.activate(meta=True), fake_ranks(config(CASE), 0, size):
        chunks = build_chunks(meta_config(config(CASE)), size, builder(CASE), torch.device("meta"))
        facts = model_facts.of_model(chunks)
    parallelism = replace(found.parallelism, tensor_parallel=CASE.tp, sequence_parallel=True)
    model = replace(found.model, facts=facts)
    kinds = tuple(map(slower_with_less, found.kinds))
    return replace(found, model=model, parallelism=parallelism, kinds=kinds)


def slower_with_less(kind):
    """Times that are not this machine's, so that the same plan is checked everywhere."""
    most = max(record.held_bytes for record in kind.choices)
    choices = (
        replace(record, forward_ms=1.0, backward_ms=3 - record.held_bytes / most)
        for record in kind.choices
    )
    return replace(kind, choices=tuple(choices))


@pytest.fixture(scope="module")
def profile():
    with ProcessPoolExecutor(1, fresh_processes()) as pool:
        return pool.submit(profile_of_a_model).result(timeout=240)


def plan_of(profile, budget_share=0.5, pp=2, vp=None):
    layout = Layout.from_flags(8, pp, vp)
    problem = Problem(profile, layout, Schedule(pp, vp or 1, 4))
    least = max(choice.peak_bytes for choice in problem.stages.leanest)
    most = max(choice.peak_bytes for choice in problem.stages.fastest)
    return make_plan(problem.at(round(least + (most - least) * budget_share)))


def run(plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan.save(path)
    code = main(["verify", str(path)])
    return code, capsys.readouterr()


@pytest.mark.any_version
def test_the_processes_of_the_stages_say_nothing(profile, tmp_path, capfd):
    verified(profile, tmp_path, capfd, 2, None)


def test_a_plan_is_what_megatrons_schedule_does_with_chunks(profile, tmp_path, capsys):
    verified(profile, tmp_path, capsys, 2, 2)


@pytest.mark.parametrize(
    ("text", "vp", "overlap_p2p_comm"),
    [
        pytest.param("full+ahead", None, True, marks=pytest.mark.any_version),
        ("none*1,full+ahead*2,none*1,full+ahead*4", None, True),
        ("full+ahead*2,none*2,full/2+ahead*4", 2, True),
        pytest.param("full+ahead*2,none*2,full+ahead*4", 2, False, marks=pytest.mark.any_version),
    ],
)
def test_what_recomputes_ahead_counts_as_in_megatrons_schedule(profile, text, vp, overlap_p2p_comm):
    profile = replace(profile, overlap_p2p_comm=overlap_p2p_comm)
    policy = RecomputePolicy.parse(text, num_layers=8)
    plan = replace(plan_of(profile, vp=vp), recompute_policy=tuple(policy.to_config()))
    for check in verify.verify(plan):
        assert check.predicted_bytes == pytest.approx(check.megatron_bytes, abs=1024), check


def verified(profile, tmp_path, captured, pp, vp):
    code, printed = run(plan_of(profile, pp=pp, vp=vp), tmp_path, captured)
    assert (code, printed.err.strip()) == (0, "")
    *rows, verdict = printed.out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [str(stage) for stage in range(pp)]
    assert all(row.split()[3].endswith("0.00%") for row in rows)
    assert verdict == (
        f"Verified: all {pp} stages fit; Megatron's own peaks are within 0.00% of those predicted."
    )


@pytest.mark.any_version
def test_piped_lines_are_printed_as_soon_as_their_stage_is_done(monkeypatch, profile, tmp_path):
    printed_before = []

    def stages_one_by_one(run, numbers, max_workers, done):
        for _ in numbers:
            printed_before.append(out.getvalue().count("\n"))
            done(SimpleNamespace(peak_bytes=1))

    monkeypatch.setattr(verify, "in_processes", stages_one_by_one)
    path = tmp_path / "plan.json"
    plan_of(profile, pp=4).save(path)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["verify", str(path)])
    assert printed_before == [0, 2, 3, 4]  # the header comes with the first


@pytest.mark.any_version
@pytest.mark.parametrize(("pp", "vp"), [(4, 1), (2, 2), (8, 1)])
def test_stages_run_no_more_microbatches_than_their_peaks_need(monkeypatch, profile, pp, vp):
    layout = Layout.from_flags(8, pp, vp)
    problem = Problem(profile, layout, Schedule(pp, vp, 64))
    plan = make_plan(problem.at(max(choice.peak_bytes for choice in problem.stages.fastest)))
    asked = []

    def no_run(job, num_microbatches, policy, stage, lengths):
        asked.append(num_microbatches)
        return SimpleNamespace(peak_bytes=1)

    def in_this_process(run, numbers, max_workers, done):
        for each in numbers:
            done(run(each))

    monkeypatch.setattr(verify, "run_stage", no_run)
    monkeypatch.setattr(verify, "in_processes", in_this_process)
    verify.verify(plan)
    whole = plan.problem().cost(plan.policy)
    (number,) = set(asked)
    assert number <= (pp + 2 if vp == 1 else 4 * pp)
    shorter = Problem(profile, layout, Schedule(pp, vp, number)).cost(plan.policy)
    for fewer, all_of_them in zip(shorter.stages, whole.stages, strict=True):
        assert fewer.peak.bytes == all_of_them.peak.bytes


@pytest.mark.any_version
def test_small_figures_are_in_mib_and_what_is_wrong_is_the_last_word(capsys):
    sizes = {"static_bytes": MIB}
    unit = unit_for([5 * MIB])
    print_row(StageCheck(0, 4 * MIB, 4 * MIB, budget_bytes=6 * MIB, **sizes), unit)
    print_row(StageCheck(1, 4 * MIB, 5 * MIB, budget_bytes=6 * MIB, **sizes), unit)
    print_row(StageCheck(2, 4 * MIB, 4 * MIB, budget_bytes=4 * MIB, **sizes), unit)
    header, fine, apart, over = capsys.readouterr().out.splitlines()
    assert header.split()[1:5] == ["predicted", "MiB", "Megatron", "MiB"]
    assert fine.split() == ["0", "4.0", "4.0", "+0.00%", "5.0", "6.0"]
    assert len(fine) == len(header)
    assert apart == f"{apart[: len(header)]}  differs"
    assert over == f"{over[: len(header)]}  over budget"


def job_that_measured(plan, policy, peaks):
    """The plan with a step that its job measured: two ranks a stage, the second one fuller."""
    ranks = [
        RankStep(2 * stage + rank, stage, max_memory_allocated_bytes=peak - (1 - rank))
        for stage, peak in enumerate(peaks)
        for rank in range(2)
    ]
    step = MeasuredStep(3, policy, plan.schedule.num_microbatches, tuple(ranks))
    records = tuple(
        StageRecord(tuple(layer for chunk in chunks for layer in chunk.layers), StaticBytes(0))
        for chunks in plan.layout.stages
    )
    return replace(plan, profile=replace(plan.profile, stages=records, measured_step=step))


@pytest.mark.any_version
def test_the_peak_of_the_step_that_a_job_measured_stands_beside_megatrons(
    profile, tmp_path, capsys
):
    plan = job_that_measured(plan_of(profile), "full*8", [GIB] * 2)
    leanest = replace(plan, recompute_policy=("full",) * 8)
    totals = [check.total_bytes for check in verify.verify(leanest)]
    own = [check.total_bytes for check in verify.verify(plan)]
    job = job_that_measured(plan, "full*8", [round(total / 0.99) for total in totals])
    job = replace(job, measured_peak_bytes=tuple(round(total / 0.995) for total in own))
    job.save(tmp_path / "job.json")
    plan.save(tmp_path / "plan.json")
    words = ["verify", str(tmp_path / "plan.json"), "--measured", str(tmp_path / "job.json")]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["stage"]) for row in rows] == [
        *(("plan", 0), ("plan", 1)),
        *(("iteration 3", 0), ("iteration 3", 1)),
    ]
    assert [row["job_error"] for row in rows[2:]] == pytest.approx([-0.01, -0.01], abs=1e-4)
    assert [row["static_bytes"] + row["megatron_bytes"] for row in rows[2:]] == totals

    assert main(["verify", str(tmp_path / "job.json")]) == 0  # a plan that its own job measured
    _, *rows, verdict = capsys.readouterr().out.splitlines()
    job_errors = [cell for row in rows for cell in row.split() if cell.endswith("%")][1::2]
    assert job_errors == ["-0.50%", "-0.50%", "-1.00%", "-1.00%"]
    assert rows[-1].split()[:3] == ["iteration", "3", "1"]
    assert verdict.endswith("The job's own peaks differ from these totals by at most 1.00%.")


@pytest.mark.any_version
def test_the_peaks_of_a_job_that_ran_something_else_are_refused(profile, tmp_path, capsys):
    plan_of(profile).save(tmp_path / "plan.json")
    other = plan_of(profile, pp=4)
    for job, said in (
        (other, "holds no peak of a job's own step for every stage"),
        (job_that_measured(other, "full*8", [GIB] * 4), "ran other stages and chunks"),
    ):
        job.save(tmp_path / "job.json")
        words = ["verify", str(tmp_path / "plan.json"), "--measured", str(tmp_path / "job.json")]
        assert main(words) == 9
        assert said in capsys.readouterr().err


@pytest.mark.any_version
def test_a_plan_and_its_verification_are_one_json_document(profile, tmp_path, capsys):
    profile.save(tmp_path / "profile.json")
    plan = plan_of(profile)
    budget = str(plan.budget_bytes[0] / GIB)
    words = ["plan", "--profile", str(tmp_path / "profile.json"), "--budget-gib", budget]
    pipeline = ["--pp", "2", "--num-microbatches", "4"]
    assert main([*words, *pipeline, "--verify", "--json"]) == 0
    text = capsys.readouterr().out
    assert [row["fits"] for row in json.loads(text)["verified"]] == [True, True]
    assert Plan.from_json(text).proven


def test_stages_run_in_as_many_processes_as_there_are_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert [workers(stages) for stages in (1, 3, 64)] == [1, 3, 4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)), raising=False)
    assert workers(64) == MOST_WORKERS


def test_a_layer_that_holds_more_than_its_record_says_ends_with_exit_code_10(
    profile, tmp_path, capsys
):
    kind = profile.kinds[0]
    light = tuple(replace(c, held_bytes=round(c.held_bytes * 0.97)) for c in kind.choices)
    wrong = replace(profile, kinds=(replace(kind, choices=light),))
    code, printed = run(plan_of(wrong, 0.9), tmp_path, capsys)
    assert code == 10
    assert "Megatron's own schedule" in printed.err
    assert "differs" in printed.out


def test_only_a_prediction_that_is_too_high_may_be_off_by_a_boundary_tensor():
    sizes = {"static_bytes": 0, "budget_bytes": 2000, "allowed_bytes": 20}
    assert StageCheck(0, 1020, 1000, **sizes).agrees
    assert not StageCheck(0, 1021, 1000, **sizes).agrees
    assert not StageCheck(0, 980, 1000, **sizes).agrees


def test_a_stage_that_needs_more_than_its_budget_is_an_error_even_where_predicted_rightly():
    fits = StageCheck(0, 100, 100, static_bytes=50, budget_bytes=150)
    require_verified((fits,))
    over = StageCheck(1, 100, 100, static_bytes=51, budget_bytes=150)
    with pytest.raises(VerificationError, match=r"Stage 1 needs .*; its budget"):
        require_verified((fits, over))


@pytest.mark.parametrize("text", ["Ettt|ttt|tt|mL", "Et|t|t|ttttt|tmL", "Ettttt|ttmL"])
def test_a_layout_is_read_back_from_the_text_given_to_megatron(text):
    layout = Layout.parse(text, pp=text.count("|") + 1)
    again = Layout.from_flags(
        layout.num_layers,
        layout.num_stages,
        mtp_num_layers=1,
        pipeline_model_parallel_layout=layout_text(layout),
    )
    assert again == layout


def trained_with_auto(plan_path):
    """A few steps of `auto` on two stages, which write its plan."""
    from megatron.core import parallel_state

    from megatron_autorecompute.compare.workload import TrainingJob
    from megatron_autorecompute.profile import Parallelism
    from megatron_autorecompute.runtime.auto_options import AutoOptions
    from megatron_autorecompute.runtime.controller import Auto, JobFacts

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    job = TrainingJob(replace(SHAPE, **layers(8)), TEXT)
    options = AutoOptions(
        recompute_memory_budget_gib=0.012, recompute_plan_path=plan_path, recompute_measure_steps=8
    )
    parallelism = Parallelism(SHAPE.micro_batch_size, SHAPE.seq_length, dtype="float32")
    facts = JobFacts(
        parallelism, lambda: SHAPE.num_microbatches, lambda text: None, without_cuda=True
    )
    tuner = Auto(job.chunks, job.optimizer, options, facts)
    for _ in range(16):
        with tuner.step():
            job.step()
    tuner.close()


@pytest.mark.newest_version
def test_the_plan_of_an_auto_run_is_what_megatrons_schedule_does(tmp_path, capsys):
    path = tmp_path / "plan.json"
    run_ranks(trained_with_auto, 2, str(path), timeout_s=240)
    code = main(["verify", str(path)])
    printed = capsys.readouterr()
    assert (code, printed.err.strip()) == (0, ""), printed.out


def rebuilt_from_its_facts(kind, fields):
    """What a config's facts leave out of it, after a trip through JSON.

    The config's class is of another package, which adds fields, as Megatron Bridge's are.
    """
    from megatron_autorecompute.compat import model_facts

    config = tiny_config(kind, **fields)
    foreign = [("seq_length", int, 7)]
    config.__class__ = make_dataclass("Provider", foreign, bases=(type(config),))
    again = model_facts.config_of(json.loads(json.dumps(model_facts.of_config(config))), "these")
    return [name for name, value in vars(config).items() if _differs(value, vars(again)[name])]


def _differs(value, other):
    return not callable(value) and value != other


@pytest.mark.parametrize("kind", ["dense", "moe", "mla"])
def test_a_config_is_rebuilt_from_its_facts(kind):
    assert run_ranks(rebuilt_from_its_facts, 1, kind, {"init_method_std": 0.5}) == [[]]


def test_a_profile_that_does_not_say_how_to_build_its_model_is_refused(profile, tmp_path, capsys):
    bare = replace(profile, model=replace(profile.model, facts={}))
    code, printed = run(plan_of(bare), tmp_path, capsys)
    assert code == 4
    assert "model.facts lack transformer_config" in printed.err


def test_a_profile_of_fused_layers_is_refused(profile, tmp_path, capsys):
    facts = profile.model.facts | {"transformer_impl": "transformer_engine"}
    fused = replace(profile, model=replace(profile.model, facts=facts))
    code, printed = run(plan_of(fused), tmp_path, capsys)
    assert code == 4
    assert "only Megatron's local layers run" in printed.err
