"""The comparison as a user runs it, in a small size, and as it ends when something goes wrong."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from rich.console import Console

from megatron_autorecompute.cli import main as program
from megatron_autorecompute.cli.program import parser
from megatron_autorecompute.compare import rendering, run
from megatron_autorecompute.compare.comparison import Comparison, Shape
from megatron_autorecompute.compare.run import Contest, Settings, messages_of
from megatron_autorecompute.compat import checkpoints, model_layers
from megatron_autorecompute.errors import InfeasibleError, MachineError
from megatron_autorecompute.patched import patched
from megatron_autorecompute.planner.plan import Plan
from tests.default_model import flags, layers
from tests.hybrid_models import HAVE_HYBRID, runnable

ROOT = Path(__file__).parents[2]
PATTERN = "--hybrid-layer-pattern"
SIZES = [
    *("--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--num-microbatches", "2", "--rounds", "2", "--tries", "1"),
]
SMALL = [*SIZES, *flags(4)]


def main(words):
    return program(["compare", *words])


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def finished(forking, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    with (
        pytest.MonkeyPatch.context() as patch,
        forking(),
        contextlib.redirect_stdout(StringIO()) as printed,
    ):
        patch.chdir(ROOT)
        assert main([*SMALL, "--output", str(folder)]) == 0
    return folder, printed.getvalue()


def without_ahead(comparison):
    """Its rows, without the one that is there if times make a plan differ."""
    return [row for row in comparison.rows() if row.name != "ours, recompute ahead"]


@pytest.mark.newest_version
def test_every_row_of_the_table_is_there_and_timed(finished):
    folder, printed = finished
    comparison = Comparison.load(folder / "comparison.json")
    families = [row.family for row in without_ahead(comparison)]
    assert families == ["none", "selective", "full", "skips", "manual", "ours"]
    assert all(len(row.step_ms) == 2 for row in comparison.rows())
    assert comparison.complete
    assert all(row.name in printed for row in comparison.rows())


@pytest.mark.newest_version
def test_none_exceeds_the_budget_and_full_wastes_it(finished):
    comparison = Comparison.load(finished[0] / "comparison.json")
    none, _, full, skips, manual, ours = without_ahead(comparison)
    assert comparison.exceeds(none)
    assert max(full.peak_bytes) < comparison.budget_bytes
    assert skips.peak_bytes == pytest.approx(full.peak_bytes, rel=0.002)  # costs no byte
    assert not comparison.exceeds(manual)
    assert not comparison.exceeds(ours)


@pytest.mark.newest_version
def test_our_peak_is_what_the_plan_said(finished):
    ours = without_ahead(Comparison.load(finished[0] / "comparison.json"))[-1]
    for measured, predicted in zip(ours.peak_bytes, ours.predicted_peak_bytes, strict=True):
        assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.newest_version
def test_every_setting_of_megatrons_was_tried_or_has_a_reason(finished):
    folder, printed = finished
    comparison = Comparison.load(folder / "comparison.json")
    tried = {row.name: row for row in comparison.strategies if row.family == "tried"}
    passed_over = {setting.name: setting.reason for setting in comparison.not_tried}
    modules = ("core_attn", "layernorm", "mlp")
    sets = (chosen for size in (1, 2, 3) for chosen in itertools.combinations(modules, size))
    named = {"none", "block/1", "uniform/1", "uniform/2"}
    named |= {f"selective[{'+'.join(chosen)}]" for chosen in sets}
    assert tried.keys() | passed_over.keys() == named
    assert not tried.keys() & passed_over.keys()
    for reason in passed_over.values():
        (name,) = re.findall(r"reruns all that (\S+) reruns, which fits, and more", reason)
        assert tried[name].step_ms
        assert not comparison.exceeds(tried[name])
        assert reason in " ".join(printed.split())
    fitting = [row for row in tried.values() if row.step_ms]
    best = min(fitting, key=lambda row: row.median_ms)
    (manual,) = (row for row in comparison.rows() if row.family == "manual")
    assert manual.policy == best.policy
    assert all(not comparison.exceeds(row) for row in fitting)


@pytest.mark.newest_version
def test_the_files_around_the_record_are_written(finished):
    folder, _ = finished
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    comparison = Comparison.load(folder / "comparison.json")
    rows = comparison.rows()
    assert (folder / "comparison.md").read_text().count("\n| ") == 2 + len(rows)
    plan, ours = Plan.load(folder / "plan.json"), without_ahead(comparison)[-1]
    assert plan.policy.format() == ours.policy


@pytest.mark.newest_version
def test_the_report_of_our_plan_is_written_and_named(finished):
    folder, printed = finished
    assert f"{folder}/plan.html" in "".join(printed.split("\n"))
    assert Plan.load(folder / "plan.json").policy.format() in (folder / "plan.html").read_text()


@pytest.mark.newest_version
def test_the_plan_is_what_megatrons_schedule_does(finished, capsys):
    code = program(["verify", str(finished[0] / "plan.json")])
    assert (code, capsys.readouterr().err.strip()) == (0, "")


@pytest.mark.any_version
def test_the_parent_needs_no_megatron_and_without_cuda_no_torch():
    code = "import sys; from megatron_autorecompute.cli.program import parser; parser('compare'); "
    code += "print(*{'megatron.core', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == ("" if torch.__version__.endswith("+cpu") else "torch")


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--budget-gib", "0.001"], 3, "is below what full recompute of every layer needs"),
        (["--text", "nowhere.txt"], 7, "No such file or directory: 'nowhere.txt'. Give a path"),
        (["--text", "[red]no[/blue]"], 7, "No such file or directory: '[red]no[/blue]'"),
        (["--output", "LICENSE/[bold]"], 7, "Not a directory: 'LICENSE/[bold]'. Give a path"),
        (["--seq-length", "40000"], 7, "bytes; a microbatch of 2 sequences of 40000 tokens needs"),
        (["--rounds", "0"], 9, "--rounds 0: it must be from 1 to"),
        (["--num-microbatches", "-1"], 9, "--num-microbatches -1: it must be from 1"),
        (["--pipeline-stages", "3"], 9, "--num-layers 4: it must be a multiple of 3 stages."),
        (["--num-attention-heads", "5"], 9, "--hidden-size 64: it must be a multiple of 5 heads."),
        (["--budget-gib", "nan"], 9, "--budget-gib nan: it must be from 0 to"),
        (["--budget-gib", "1e308"], 9, "--budget-gib 1e+308: it must be from 0 to"),
        (["--budget-fraction", "nan"], 9, "--budget-fraction nan: it must be from 0 to 1"),
        (["--timeout-s", "inf"], 9, "--timeout-s inf: it must be from 1 to"),
        (["--seed", "-1"], 9, "--seed -1: it must be from 0 to"),
        ([f"{PATTERN}=-*-"], 8, "3 of 3 layers cannot be divided evenly"),
        ([f"{PATTERN}=*-|X"], 8, "'X' at position 3 is no layer"),
        ([f"{PATTERN}=*|-|*|-"], 8, "do not make 2 stages of 1 chunks"),
        ([f"{PATTERN}=*-|M"], 7, "'M' (mamba) runs kernels that are not installed"),
        ([f"{PATTERN}=*-|G"], 9, "'G': the comparison has no sizes for gdn layers"),
    ],
)
def test_bad_input_says_what_to_do(arguments, code, message, tmp_path, capsys):
    small = [*SIZES, "--num-layers", "4", "--output", str(tmp_path)]
    assert main([*small, *arguments]) == code
    said = capsys.readouterr().err
    assert said.startswith("megatron-autorecompute compare: ")
    assert message in " ".join(said.split())


def small_job(variant=None, **fields):
    from megatron_autorecompute.compare.workload import TrainingJob

    shape = Shape(
        **{
            **layers(4),
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 32,
            "pipeline_stages": 1,
            **fields,
        }
    )
    job = TrainingJob(shape, (ROOT / "LICENSE").read_bytes(), variant)
    job.step()  # allocates what stays
    return job


@pytest.mark.usefixtures("one_rank")
def test_every_uniform_is_tried_that_megatron_itself_can_run():
    job = small_job()
    ran = []
    for count in range(1, 5):
        with job.strategy(f"megatron:uniform/{count}"), contextlib.suppress(IndexError):
            job.step()
            ran.append(f"megatron:uniform/{count}")
    blocks = [f"megatron:block/{count}" for count in range(1, 4)]
    assert job.counted_settings() == blocks + ran


MOE = {
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_layer_freq": [0, 1, 1, 1],
}
MLA = {
    "add_bias_linear": False,
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
}


HYBRID = pytest.mark.skipif(not HAVE_HYBRID, reason="this megatron-core has no HybridModel")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("fields", "modules"),
    [
        pytest.param(
            *(MOE, ("core_attn", "layernorm", "mlp", "moe", "shared_experts")),
            marks=pytest.mark.any_version,
        ),
        (MLA, ("core_attn", "layernorm", "mla_up_proj", "mlp")),
        ({}, ("core_attn", "layernorm")),  # with biases Megatron's mlp would never end
        pytest.param("EM*-", ("core_attn", "layernorm", "mlp", "moe"), marks=HYBRID),
    ],
)
def test_every_set_of_modules_that_some_layer_has_is_a_setting_that_megatron_runs(fields, modules):
    from megatron_autorecompute.compare.workload import Variant

    with runnable():
        if isinstance(fields, str):
            variant = Variant({"add_bias_linear": False})
            job = small_job(variant, hybrid_layer_pattern=fields)
        else:
            job = small_job(Variant(fields, gpt_layers), num_layers=4, hybrid_layer_pattern=None)
        every_set_is_a_setting(job, fields, modules)


def gpt_layers(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False)


def every_set_is_a_setting(job, fields, modules):
    settings = [text for text in job.own_settings() if text.startswith("megatron:selective")]
    sizes = range(1, len(modules) + 1)
    sets = (chosen for size in sizes for chosen in itertools.combinations(modules, size))
    assert settings == [f"megatron:selective[{'+'.join(chosen)}]" for chosen in sets]
    assert job.left_out().keys() == (set() if fields else {"mlp"})
    for text in settings:
        with job.strategy(text):
            job.step()


class RunsOut:
    """A layer that runs out of memory in its first forward (1) or when that is replayed (2)."""

    def __init__(self, layer, when):
        self.left, self.hook = when, layer.register_forward_pre_hook(self)

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.newest_version
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("when", [1, 2])
def test_a_strategy_that_runs_out_of_memory_is_a_row_and_the_next_one_runs(when):
    job, untouched = small_job(), small_job()
    runs_out = RunsOut(model_layers.numbered_layers(job.chunks)[1][0], when)
    with job.strategy("megatron:uniform/1"):
        assert job.peak_bytes()[1]
    assert not megatron_random.is_checkpointing()
    runs_out.hook.remove()
    for policy in ("megatron:uniform/1", "megatron:none", "full*2,none*2"):
        with job.strategy(policy):
            assert job.peak_bytes()[0] == pytest.approx(peak_under(policy, untouched), rel=0.01)


@pytest.mark.newest_version
@pytest.mark.usefixtures("one_rank")
def test_where_no_setting_fits_the_table_says_so_and_the_comparison_is_infeasible():
    told, job = [], small_job()
    contest = Contest(Settings(job.shape, tries=1), job, told.append)
    contest.job.peak_bytes = lambda: (123456, True)
    contest.anchors()
    contest.set_budget()
    contest.manual_search()
    for shown in (rendering.markdown(told[-1]), printed(rendering.table(told[-1]))):
        assert shown.count("OOM") == 4
        assert f"None of the {len(job.own_settings())} settings tried by hand fits" in shown
    with pytest.raises(InfeasibleError, match=r"memory even where every layer .* Lower --micro-b"):
        contest.ours()


def printed(shown):
    console = Console(width=200, file=StringIO())
    console.print(shown)
    return console.file.getvalue()


def peak_under(policy, job):
    with job.strategy(policy):
        job.step()
        return job.peak_bytes()[0]


@pytest.mark.newest_version
def test_between_stages_a_row_shows_what_recompute_ahead_changes(forking, tmp_path):
    sizes = ["--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
    steps = ["--num-microbatches", "4", "--rounds", "1", "--tries", "1"]
    stages = ["--pipeline-stages", "2", "--budget-fraction", "0.05"]
    with forking():
        assert main([*sizes, *steps, *stages, *flags(4), "--output", str(tmp_path)]) == 0
    rows = {row.name: row for row in Comparison.load(tmp_path / "comparison.json").rows()}
    plain, early = rows["ours"], rows["ours, recompute ahead"]
    assert "+ahead" not in plain.policy
    assert "+ahead" in early.policy
    assert early.predicted_step_ms < plain.predicted_step_ms
    assert len(early.step_ms) == len(plain.step_ms)
    assert not Plan.load(tmp_path / "plan.json").policy.is_ahead


@pytest.mark.newest_version
@pytest.mark.usefixtures("one_rank")
def test_out_of_memory_on_one_of_two_stages_says_what_to_give():
    job = small_job()
    job.shape = replace(job.shape, pipeline_stages=2)
    RunsOut(model_layers.numbered_layers(job.chunks)[1][0], when=2)
    with (
        job.strategy("megatron:uniform/1"),
        pytest.raises(
            MachineError, match=r"out of memory\. Give --pipeline-stages 1, or a smaller"
        ),
    ):
        job.peak_bytes()
    checkpoints.leave_interrupted(job.chunks)


@pytest.mark.any_version
def test_on_a_gpu_there_is_one_stage_however_many_gpus(monkeypatch):
    monkeypatch.setattr("megatron_autorecompute.compare.run.version", lambda _: "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for words, stages in (([], 1), (["--pipeline-stages", "4"], 4)):
        assert parser("compare").parse_args(["compare", *words]).pipeline_stages == stages


@pytest.mark.any_version
def test_ranks_that_cannot_reach_each_other_say_so(tmp_path, capfd, monkeypatch):
    # capfd: forked ranks would have the environment of the process that they are forked from
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main([*SMALL, "--output", str(tmp_path)]) == 7
    assert "The ranks cannot reach each other" in capfd.readouterr().err


def in_its_rounds(path):
    return path.exists() and Comparison.load(path).rows()[-1].family == "ours"


@pytest.fixture
def running(tmp_path):
    """A comparison in its rounds, with ten minutes to go."""
    command = [sys.executable, "scripts/compare_policies.py", *SMALL, "--num-layers", "2"]
    command += ["--rounds", "2000"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    path = tmp_path / "comparison.json"
    deadline = time.monotonic() + 240
    try:
        while not in_its_rounds(path):
            assert time.monotonic() < deadline, "the comparison never got to its rounds"
            time.sleep(0.3)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.any_version
def test_interrupting_keeps_what_was_finished(running, tmp_path):
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    kept = "what was finished is in the output folder"
    assert errors == f"megatron-autorecompute compare: interrupted: {kept}.\n"
    assert not Comparison.load(tmp_path / "comparison.json").complete
    assert (tmp_path / "comparison.png").exists()


@pytest.mark.newest_version
def test_no_figure_is_cut_off_beside_a_long_name(finished):
    whole = Comparison.load(finished[0] / "comparison.json")
    none, *rest = whole.strategies
    long = replace(none, name="manual: selective[core_attn+layernorm+mla_up_proj+moe]")
    out = StringIO()
    Console(width=80, file=out).print(rendering.table(replace(whole, strategies=(long, *rest))))
    assert "…" not in out.getvalue()


def ranks_that_say(messages):
    said = contextlib.nullcontext(messages)
    return patched(run, "from_ranks", lambda settings: said)


@pytest.mark.newest_version
@pytest.mark.parametrize("measured", [0, 1])
def test_a_folder_never_holds_files_of_two_comparisons(finished, measured, tmp_path, capsys):
    earlier = {file.name: file.read_bytes() for file in finished[0].iterdir()}
    for name, data in earlier.items():
        (tmp_path / name).write_bytes(data)
    first = replace(Comparison.load(tmp_path / "comparison.json"), complete=False)
    first = replace(first, strategies=first.strategies[:1])

    def messages():
        yield from [first] * measured
        raise KeyboardInterrupt

    with ranks_that_say(messages()):
        assert main([*SMALL, "--output", str(tmp_path)]) == 130
    found = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    if measured:
        assert found.keys() == {"comparison.json", "comparison.md", "comparison.png"}
        assert found["comparison.png"] != earlier["comparison.png"]
    else:
        assert found == earlier
        assert "is as it was" in capsys.readouterr().err


@pytest.mark.newest_version
def test_a_picture_that_cannot_be_written_leaves_the_table_on_the_screen(
    finished, tmp_path, capsys
):
    whole = Comparison.load(finished[0] / "comparison.json")
    (tmp_path / "comparison.png").mkdir()
    with ranks_that_say([whole]):
        assert main([*SMALL, "--output", str(tmp_path)]) == 4
    said = capsys.readouterr()
    assert "comparison.png: Is a directory" in " ".join(said.err.split())
    assert "manual" in said.out


def kill_a_rank_in_its_rounds(path):
    while not in_its_rounds(path):
        time.sleep(0.3)
    max(multiprocessing.active_children(), key=lambda process: process.pid).kill()


@pytest.mark.any_version
def test_a_killed_rank_keeps_what_was_finished(tmp_path, capsys):
    words = [*SMALL, "--num-layers", "2", "--rounds", "2000", "--output", str(tmp_path)]
    path = tmp_path / "comparison.json"
    threading.Thread(target=kill_a_rank_in_its_rounds, args=(path,), daemon=True).start()
    assert main(words) == 7
    assert "died without a message" in " ".join(capsys.readouterr().err.split())
    assert len(Comparison.load(path).rows()) == 6


def ends(rank, said, dead):
    if rank in dead:
        os.write(said.fileno(), b"\0\0")  # a part of a message
        os._exit(9)
    said.send(MachineError(f"Rank {rank} failed: Connection closed by peer"))


@pytest.mark.any_version
@pytest.mark.parametrize("dead", [(), (1,), (1, 2)])
def test_the_death_of_a_rank_is_said_and_not_what_it_did_to_others(dead):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    ranks = [context.Process(target=ends, args=(n, pipes[n][1], dead)) for n in range(3)]
    for rank, (_, said_by) in zip(ranks, pipes, strict=True):
        rank.start()
        rank.join()
        said_by.close()
    said = f"Rank {dead[0]} died without a message" if dead else "Rank 0 failed"
    with pytest.raises(MachineError, match=said):
        list(messages_of([heard for heard, _ in pipes], ranks))
