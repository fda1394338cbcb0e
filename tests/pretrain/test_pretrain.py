"""The launcher on a small training script of ours, through megatron.training as it is released."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import megatron_autorecompute
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.report.terminal import strip, sums_of_layers
from megatron_autorecompute.runtime.auto_options import AutoOptions
from tests.pretrain.jobs import (
    FOUR_RANKS,
    MODEL,
    ROOT,
    Job,
    Launched,
    logged_ms,
    run,
)

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron-core before 0.17 carries no megatron.training", allow_module_level=True)

OURS = str(Path(megatron_autorecompute.__file__).parent)
SCRIPT = Path(ROOT, "tests", "pretrain", "pretrain_tiny.py")
FLAGS = MODEL + "--dataloader-type external "
MIXED = "full*1,selective[core_attn]*1,none*1,selective[core_attn+layernorm]*1"


@pytest.fixture(scope="module")
def launched():
    with Launched() as launched:
        yield launched


def test_a_fixed_policy_leaves_losses_and_weights_bit_identical_on_four_ranks(jobs):
    without, with_policy = jobs["four plain"], jobs["four"]
    assert len(without.losses) == 4, without.text
    assert len(without.weights) == 4
    assert with_policy.losses == without.losses, with_policy.text
    assert with_policy.weights == without.weights


def test_auto_trains_like_no_recompute_and_a_restart_measures_nothing(launched, tmp_path):
    path = tmp_path / "plan.json"
    auto = f"--recompute-policy auto --recompute-memory-budget-gib 1 --recompute-plan-path {path} "
    # argparse takes the last one.
    first = run(SCRIPT, FLAGS + auto + "--train-iters 20 ")
    again, plain = launched.run(SCRIPT, [Job(FLAGS + auto), Job(FLAGS, with_us=False)])
    assert first.losses[:4] == plain.losses, first.text
    assert json.loads(path.read_text())["recompute_policy"] == ["none"] * 4
    assert again.weights == plain.weights, again.text
    assert "measuring" in first.text
    assert "measuring" not in again.text


def test_plan_only_ends_well_before_the_training_does(launched):
    auto = "--recompute-policy auto --recompute-memory-budget-gib 1 --recompute-plan-only "
    (job,) = launched.run(SCRIPT, [Job(FLAGS + auto + SHORT + "--train-iters 500 ")])
    assert job.returncode == 0, job.text
    assert 0 < len(job.losses) < 30
    assert not job.weights  # the script's last line was not reached


def test_the_users_own_selective_flags_are_refused_with_the_translation(launched):
    flags = FLAGS + "--recompute-policy full --recompute-granularity selective"
    (job,) = launched.run(SCRIPT, [Job(flags, ranks=2)])
    assert job.returncode != 0
    assert len(set(job.said)) == 1, job.text
    assert "'megatron:selective[core_attn]'" in job.said[0]
    assert OURS not in job.text  # no traceback of ours on any rank


AUTO = "--recompute-policy auto --recompute-memory-budget-gib {budget} "
SHORT = "--recompute-measure-steps 4 --train-iters 10 "
"""Of a job that is to have a plan, whatever it has measured."""
FEWER = "--recompute-measure-steps 8 "
"""The fewest in which every phase of measuring has a step."""
EVALUATED = "--train-iters 22 --eval-interval 4 --eval-iters 1 "
SAVED = "--save {folder} --ckpt-format torch --save-interval 1000 "
SEPARATE = {
    # MoE routing differs from microbatch to microbatch, and from rank to rank.
    "moe": (
        "--train-iters 20 --num-layers 2 --global-batch-size 8 --num-experts 4 "
        "--expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type none ",
        2,
        0.02,
    ),
    "mtp": ("--train-iters 14 --mtp-num-layers 1 ", 1, 0.006),
    "interleaved": (
        "--train-iters 14 --global-batch-size 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer "
        "--overlap-grad-reduce ",
        4,
        0.0045,
    ),
}
"""Flags, ranks and a budget in GiB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def jobs(launched, folder):
    """What the jobs of the tests below printed, by name."""
    auto = FLAGS + AUTO.format(budget=0.006)
    saved = auto + SAVED.format(folder=folder / "saved")
    cut = auto + SAVED.format(folder=folder / "cut")
    grown = FLAGS.replace("--global-batch-size 4 ", "") + (
        "--train-iters 12 --pipeline-model-parallel-size 2 --step-batch-size-schedule 0:4,1216:12 "
    )
    by_name = {
        "plain": Job(FLAGS + EVALUATED, with_us=False),
        "auto": Job(auto + EVALUATED + f"--tensorboard-dir {folder / 'events'} "),
        "until 18": Job(saved + EVALUATED + "--exit-interval 18 "),
        "from 18": Job(
            saved
            + EVALUATED
            + f"--load {folder / 'saved'} --timing-log-level 1 --tensorboard-dir {folder / 'later'}"
        ),
        "cut short": Job(cut + "--train-iters 22 --exit-interval 6 "),
        "cut again": Job(cut + f"--train-iters 22 --load {folder / 'cut'} --exit-interval 8 "),
        "too short": Job(auto + f"--recompute-plan-only --recompute-plan-path {folder / 'short'} "),
        "untrained": Job(auto + "--skip-train "),
        "level 2": Job(
            auto
            + "--train-iters 18 --timing-log-level 2 "
            + f"--recompute-plan-path {folder / 'timed.json'}"
        ),
        "grown plain": Job(grown, ranks=2, with_us=False),
        "grown": Job(grown + AUTO.format(budget=0.006) + "--recompute-measure-steps 4 ", ranks=2),
        "four plain": Job(FLAGS + FOUR_RANKS, ranks=4, with_us=False),
        "four": Job(FLAGS + FOUR_RANKS + f"--recompute-policy decoder:{MIXED}", ranks=4),
    }
    pair = FLAGS + "--tensor-model-parallel-size 2 --sequence-parallel "
    planned = pair + AUTO.format(budget=0.0045) + "--recompute-plan-path " + str(folder)
    by_name |= {
        "pair plain": Job(pair, 2, with_us=False),
        "pair even": Job(planned + "/even.json --recompute-plan-only " + SHORT, 2),
        "pair fails": Job(planned + "/pair.json " + SHORT, 2, before="uneven_ranks.py"),
        "pair again": Job(planned + "/pair.json ", 2),
    }
    for name, (flags, ranks, budget) in SEPARATE.items():
        plan = f"--recompute-plan-path {folder / name} " + (FEWER if name != "moe" else "")
        by_name[f"{name} plain"] = Job(FLAGS + flags, ranks, with_us=False)
        by_name[name] = Job(FLAGS + flags + AUTO.format(budget=budget) + plan, ranks)
    outputs = launched.run(SCRIPT, list(by_name.values()))
    return dict(zip(by_name, outputs, strict=True))


@pytest.mark.parametrize("name", SEPARATE)
def test_auto_changes_no_digit_of_losses_and_weights(jobs, folder, name):
    assert jobs[name].losses == jobs[f"{name} plain"].losses, jobs[name].text
    assert jobs[name].weights == jobs[f"{name} plain"].weights
    layers = "2" if name == "moe" else "4"
    assert Plan.load(folder / name).profile.fingerprint["num_layers"] == layers


def test_evaluation_while_measuring_and_after_changes_nothing(jobs):
    assert len(jobs["auto"].losses) == 22, jobs["auto"].text
    assert jobs["auto"].losses == jobs["plain"].losses
    assert jobs["auto"].validation_losses == jobs["plain"].validation_losses
    assert len(jobs["plain"].validation_losses) == 7  # every 4th step, and two at the end


def test_a_resumed_job_continues_the_curve_and_measures_nothing(jobs):
    assert jobs["until 18"].losses == jobs["plain"].losses[:18], jobs["until 18"].text
    resumed, without = jobs["from 18"].losses, jobs["plain"].losses[18:]
    # In the second step after a resume Megatron itself prints the mean loss of both.
    assert resumed[:1] + resumed[2:] == without[:1] + without[2:], jobs["from 18"].text
    assert jobs["from 18"].weights == jobs["plain"].weights
    assert "running the plan in" in jobs["from 18"].text
    assert "measuring" not in jobs["from 18"].text


def test_a_job_that_ends_while_measuring_leaves_no_plan_and_the_next_measures_anew(jobs, folder):
    assert len(jobs["cut short"].losses) == 6, jobs["cut short"].text
    assert len(jobs["cut again"].losses) == 2, jobs["cut again"].text
    assert "measuring" in jobs["cut again"].text
    assert not (folder / "cut" / "recompute-plan.json").exists()


def last_words(job):
    """The line with which auto ends a job: the last one that it prints."""
    said = [line for line in job.text.splitlines() if line.startswith("recompute auto: ")]
    return said[-1].removeprefix("recompute auto: ")


def test_every_job_under_auto_ends_with_its_plan_and_place_or_why_there_is_none(jobs, folder):
    for name, place in (("moe", "moe"), ("until 18", "saved/recompute-plan.json")):
        plan = Plan.load(folder / place)
        words = f"the plan is {plan.policy.format()}, saved in {folder / place}"
        assert last_words(jobs[name]) == words, jobs[name].text
    assert last_words(jobs["from 18"]) == last_words(jobs["until 18"])
    said = last_words(jobs["auto"])
    assert said.endswith(", not saved: --recompute-plan-path was not given")
    assert RecomputePolicy.parse(said.removeprefix("the plan is ").split(", not")[0], num_layers=4)
    ended = "no plan: training ended after 6 steps. Measuring takes up to 14, and trying"
    assert last_words(jobs["cut short"]).startswith(ended)
    untrained = jobs["untrained"]
    assert last_words(untrained) == "no plan: this job came to no training step"


def test_a_plan_alone_that_was_not_reached_is_an_error_with_what_to_give(jobs, folder):
    short = jobs["too short"]
    assert last_words(short).startswith("no plan: training ended after 4 steps")
    assert short.returncode == 9
    assert "--recompute-plan-only was given, and training ended after 4 steps" in short.said[0]
    assert not (folder / "short").exists()


def test_a_batch_that_grows_is_planned_for_at_the_step_it_grows(jobs):
    assert jobs["grown"].losses == jobs["grown plain"].losses, jobs["grown"].text
    assert jobs["grown"].text.count("a plan for 6 microbatches") == 1


def test_tensorboard_gets_peaks_and_recompute_time_per_stage_at_megatrons_iteration(jobs, folder):
    assert jobs["auto"].returncode == 0
    names = {
        "recompute/measured_peak_gib/stage0",
        "recompute/predicted_peak_gib/stage0",
        "recompute/recompute_ms/stage0",
    }
    for run_folder, first in (("events", 0), ("later", 18)):
        lines = (folder / run_folder / "events.jsonl").read_text().splitlines()
        events = {name: (value, step) for name, value, step in map(json.loads, lines)}
        ours = {name: event for name, event in events.items() if name.startswith("recompute/")}
        assert set(ours) == names
        assert all(first <= step < 22 for _, step in ours.values())
        measured, predicted = (
            ours[f"recompute/{n}_peak_gib/stage0"][0]
            for n in (
                "measured",
                "predicted",
            )
        )
        assert measured == pytest.approx(predicted, rel=0.02)


def test_timers_that_only_measuring_needed_do_not_run_afterwards(jobs):
    # Megatron prints the timers that ran in a step: at level 0 and 1 none of level 2 may.
    for name in ("auto", "from 18"):
        last_step = jobs[name].text.rsplit("lm loss:", 2)[-2]
        assert "forward-compute" not in last_step
    assert jobs["from 18"].text.count("forward-backward ...") >= 3
    assert jobs["level 2"].text.count("forward-compute ...") == 18


def test_what_megatrons_timers_said_of_a_step_stands_beside_the_sum_of_its_layers(jobs, folder):
    text, plan = jobs["level 2"].text, Plan.load(folder / "timed.json")
    step = plan.profile.measured_step
    (rank,) = step.ranks
    logged = logged_ms(text, step.iteration)  # by Megatron itself, two digits behind the point
    seen = {
        "forward-compute": rank.forward_compute_ms,
        "backward-compute": rank.backward_compute_ms,
        "optimizer": rank.optimizer_ms,
    }
    assert seen == pytest.approx({name: logged[name] for name in seen}, abs=0.011)
    (layers,) = sums_of_layers(plan)
    forward_ms, backward_ms = (
        sum(times) * step.num_microbatches for times in (layers.forward_ms, layers.backward_ms)
    )
    row = [forward_ms, seen["forward-compute"], backward_ms, seen["backward-compute"]]
    printed = text.split("0/0", 1)[1].split()
    assert printed[:5] == [shown_ms(value) for value in (*row, seen["optimizer"])]


def shown_ms(value):
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def test_every_rank_of_a_measured_step_is_in_the_plan(jobs, folder):
    assert jobs["interleaved"].returncode == 0
    ranks = Plan.load(folder / "interleaved").profile.measured_step.ranks
    assert [(rank.rank, rank.stage) for rank in ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for rank in ranks:
        assert rank.forward_compute_ms > 0
        assert rank.backward_compute_ms > 0
        assert rank.optimizer_ms > 0
        assert rank.max_memory_allocated_bytes is None  # no CUDA, nothing made up


def test_ranks_of_a_stage_are_planned_for_the_one_that_holds_most(jobs, folder):
    assert jobs["pair even"].returncode == 0, jobs["pair even"].text
    even, uneven = (_held_bytes(Plan.load(folder / f"{name}.json")) for name in ("even", "pair"))
    more_bytes = 1 << 18  # what uneven_ranks has each layer of rank 1, and of no other, hold
    assert uneven["none"] - even["none"] == pytest.approx(more_bytes, rel=0.1)
    assert uneven["full"] - even["full"] < 0.1 * more_bytes


def _held_bytes(plan):
    return {record.choice: record.held_bytes for record in plan.profile.kinds[0].choices}


def test_out_of_memory_inside_a_tensor_parallel_group_ends_the_job_and_the_next_needs_less(
    jobs, folder
):
    failed, again, plan = jobs["pair fails"], jobs["pair again"], Plan.load(folder / "pair.json")
    assert failed.returncode == 1
    assert len(failed.losses) == 8, failed.text
    assert "a restart begins with less" in failed.text
    assert "step 8: stage 0 short of memory" in plan.notes[0]
    row = f"0  {strip(plan.policy, plan.layout.stages[0])} "
    assert row not in failed.text
    assert row in again.text, again.text
    assert again.losses == jobs["pair plain"].losses
    assert "measuring" not in again.text


def test_two_jobs_that_share_a_plan_path_each_run_a_whole_plan_of_their_own(launched, tmp_path):
    path, ended = tmp_path / "plan.json", threading.Event()
    auto = AUTO.format(budget=0.006) + f"--recompute-plan-path {path} " + SHORT
    jobs = [Job(FLAGS + auto), Job(FLAGS + auto + "--hidden-size 32 ")]
    seen = []

    def read_all_the_time():
        while not ended.is_set():
            if path.exists():
                plan = Plan.load(path)  # raises at half a file
                seen.append(plan.profile.fingerprint["hidden_size"])
            ended.wait(0.01)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_all_the_time)
        # The first two find nothing; of the next two, each finds its own plan, or the other's.
        try:
            wide, narrow = launched.run_together(SCRIPT, jobs)
            wide_too, narrow_too = launched.run_together(SCRIPT, jobs)
        finally:
            ended.set()
        reader.result()
    for one, other in ((wide, wide_too), (narrow, narrow_too)):
        assert one.returncode == other.returncode == 0, one.text + other.text
        assert one.weights == other.weights
    # Whichever wrote last, the other size found it to be of another job and said so.
    assert "Changed: " in wide_too.text + narrow_too.text
    assert set(seen) == {"32", "64"}


def test_a_policy_that_some_ranks_do_not_have_is_an_error_on_all_of_them_at_once(launched):
    pair = FLAGS + "--tensor-model-parallel-size 2 --recompute-policy "
    auto = AUTO.format(budget=1).removeprefix("--recompute-policy ")
    given = [Job(pair + policy, 2, before="uneven_flags.py") for policy in ("full ", auto)]
    full, none = (RecomputePolicy.parse(text, num_layers=4).digest() for text in ("full", "none"))
    held = f"rank 0: policy {full}; rank 1: policy {none}", "rank 0: auto; rank 1: nothing"
    for job, said in zip(launched.run(SCRIPT, given), held, strict=True):
        assert job.returncode != 0
        assert len(job.said) == 2, job.text
        assert all(said in line for line in job.said)


T5_BY_NAME = "decoder:selective[core_attn],full*2,selective[mlp];encoder:full*2,none,selective[mlp]"


def test_a_t5_trains_alike_under_a_text_under_auto_and_under_the_plan_it_leaves(launched, tmp_path):
    flags = FLAGS + "--decoder-seq-length 16 --train-iters 14 "
    plan = tmp_path / "plan.json"
    auto = AUTO.format(budget=0.009) + FEWER + f"--recompute-plan-path {plan}"
    plain, *ours, in_stages = launched.run(
        SCRIPT.with_name("pretrain_tiny_t5.py"),
        [
            Job(flags, with_us=False),
            Job(flags + f"--recompute-policy {T5_BY_NAME}"),
            Job(flags + auto),
            Job(flags + f"--recompute-policy @{plan}"),
            Job(flags + "--recompute-policy full --pipeline-model-parallel-size 2", 2),
        ],
    )
    for job in ours:
        assert len(job.losses) == 14, job.text
        assert job.losses == plain.losses
        assert job.weights == plain.weights
    assert [kind.layers for kind in Plan.load(plan).profile.kinds] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert "A T5Model on 2 pipeline stages" in in_stages.said[0], in_stages.text


def test_a_model_with_a_tower_trains_alike_under_a_file_of_names(launched, tmp_path):
    sizes = "--encoder-num-layers 3 --decoder-num-layers 4 --decoder-seq-length 32 --train-iters 2 "
    flags = FLAGS.replace("--num-layers 4 ", sizes).replace("--train-iters 4 ", "")
    file = tmp_path / "policy.txt"
    file.write_text("vision:full*1,none*2;decoder:full/2*2,none*1,selective[mlp]*1\n")
    plain, ours, missing = launched.run(
        SCRIPT.with_name("pretrain_tiny_vlm.py"),
        [
            Job(flags, with_us=False),
            Job(f"{flags} --recompute-policy @{file}"),
            Job(f"{flags} --recompute-policy decoder:full"),
        ],
    )
    assert len(plain.losses) == 2, plain.text
    assert (ours.losses, ours.weights) == (plain.losses, plain.weights), ours.text
    assert "says nothing of vision" in missing.said[0], missing.text


def test_what_auto_says_is_short(jobs):
    said = [line for line in jobs["auto"].text.splitlines() if line.startswith("recompute auto:")]
    assert len([line for line in said if "measuring" in line]) <= 13
    # Which plan it is hangs on times, and so does whether it takes a little more than predicted.
    rest = [line for line in said if "measuring" not in line and "a corrected plan" not in line]
    assert rest.pop().startswith("recompute auto: the plan is ")
    assert [line[:30] for line in rest] == [
        "recompute auto: running a plan",
        "recompute auto: running a plan",
        "recompute auto: the plan",
        "recompute auto: predicted step",
    ]
    assert max(map(len, said[:-1])) <= 140  # the last one has the policy's text


REFUSED_BEFORE_A_MODEL_IS_BUILT = {
    "--recompute-policy decoder:full*3": (2, "the model has 4"),
    "--recompute-policy full*4 --decoder-seq-length 16": (2, "the model has 8"),
    "--recompute-policy selective[nothing]": (2, "Unknown module nothing"),
    "--recompute-policy full --hybrid-layer-pattern *-[*-]": (8, "'[' at position 2 is no layer"),
    "--recompute-policy full,,": (2, "Cannot read"),
    "--recompute-policy @no/such/file": (2, "Cannot read the policy file"),
    "--recompute-policy selective[moe_act]": (2, "moe_act"),
    "--recompute-policy full --cpu-offloading-num-layers 1": (2, "offloading"),
    "--recompute-policy full --recompute-plan-only": (9, "only auto uses that"),
    "--recompute-memory-budget-gib 0.0042 --recompute-plan-path np.json": (
        9,
        "--recompute-memory-budget-gib 0.0042, --recompute-plan-path np.json: given with no policy",
    ),
    "--recompute-policy full --recompute-memory-budget-gib 1": (9, "only auto uses that"),
    "--recompute-choices megatron": (9, "--recompute-choices megatron: given with no policy"),
    "--recompute-policy full+keep[core_attn] --recompute-choices megatron": (
        2,
        "Layer 0: full+keep[core_attn] as Megatron's own checkpoints run it: they have no",
    ),
    "--recompute-policy auto --recompute-memory-budget-gib 1e9": (9, "this machine has"),
    "--recompute-policy auto --recompute-imbalance-percentile 90": (9, "this model has none"),
    "--recompute-policy auto --recompute-memory-budget-gib 0": (9, "above 0"),
    "--recompute-policy auto --cuda-graph-impl local": (9, "a CUDA graph keeps"),
    "--recompute-policy none --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 2": (2, "megatron:block/2"),
}


@pytest.fixture(scope="module")
def parsed(launched, folder):
    """Exit code and printed text for each line of flags; one process for all."""
    lines = [FLAGS + flags for flags in (*REFUSED_BEFORE_A_MODEL_IS_BUILT, *ACCEPTED)]
    path = folder / "flags.txt"
    path.write_text("\n".join(line.strip() for line in lines))
    (job,) = launched.run(SCRIPT, [Job(str(path), before="parse_flags.py")])
    printed = job.text.splitlines()
    ends = {line.split()[1]: line.split()[2] for line in printed if line.startswith("ends ")}
    assert len(ends) == len(lines), job.text
    said = iter(job.said)
    results = {}
    names = (*REFUSED_BEFORE_A_MODEL_IS_BUILT, *ACCEPTED)
    for number, name in enumerate(names):
        code = ends[str(number)]
        results[name] = (code, "" if code == "accepted" else next(said))
    (runs,) = [line for line in printed if line.startswith("runs ")]
    results["--recompute-choices megatron, with a policy"] = runs
    return results


ACCEPTED = (
    "",
    "--recompute-policy auto",
    "--recompute-policy megatron:block/2",
    "--recompute-policy megatron:uniform/2",
    "--recompute-policy megatron:selective[core_attn+layernorm]",
    "--recompute-policy full/2*2,none*2",
    "--recompute-policy vision:full;decoder:full/2*2,none*2",
    "--recompute-policy none --cuda-graph-impl local",
    "--recompute-policy full/2*2,selective[mlp]*2 --recompute-choices megatron",
)


@pytest.mark.parametrize("flags", REFUSED_BEFORE_A_MODEL_IS_BUILT)
def test_what_cannot_work_is_refused_before_a_model_is_built(parsed, flags):
    code, text = REFUSED_BEFORE_A_MODEL_IS_BUILT[flags]
    assert parsed[flags][0] == str(code)
    assert text in parsed[flags][1]


@pytest.mark.parametrize("flags", ACCEPTED)
def test_what_megatron_allows_is_accepted(parsed, flags):
    assert parsed[flags][0] == "accepted"


def test_choices_of_megatron_are_those_of_any_policy(parsed):
    runs = parsed["--recompute-choices megatron, with a policy"]
    assert runs == "runs full/2+all*2,selective[mlp]+all*2"


def test_help_lists_the_grammar_megatrons_strategies_and_every_option():
    command = [sys.executable, "-m", "megatron_autorecompute.pretrain", "--help"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    words = " ".join(job.stdout.split())
    for word in ("--recompute-policy", "megatron:block/N", "megatron:uniform/N", "CHOICE*COUNT"):
        assert word in words, job.stderr
    for option in dataclasses.fields(AutoOptions):
        assert f"--{option.name.replace('_', '-')}" in words


HYBRID = "--hybrid-layer-pattern *-*|-/*- --pipeline-model-parallel-size 2 --train-iters 14 "


def test_a_hybrid_model_of_uneven_segments_trains_alike_under_a_text_and_under_auto(
    launched, tmp_path
):
    plan = tmp_path / "plan.json"
    auto = AUTO.format(budget=0.01) + FEWER + f"--recompute-plan-path {plan}"
    plain, text, tuned, refused = launched.run(
        SCRIPT.with_name("pretrain_tiny_hybrid.py"),
        [
            Job(FLAGS.replace("--num-layers 4 ", "") + HYBRID + more, 2, with_us=us)
            for more, us in [
                ("", False),
                ("--recompute-policy full/3*3,selective[mlp]*1,inner/1*1", True),
                (auto, True),
                ("--recompute-policy full/2*4,none*1", True),
            ]
        ],
    )
    for job in (text, tuned):
        assert len(job.losses) == 14, job.text
        assert job.losses == plain.losses
        assert job.weights == plain.weights
    kinds = {kind.name: kind.layers for kind in Plan.load(plan).profile.kinds}
    assert kinds == {"attention": (0, 2), "mlp": (1, 3), "mtp": (4,)}
    assert "a checkpoint cannot span two chunks" in refused.said[0], refused.text
