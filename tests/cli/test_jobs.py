"""A job on the command line of plan and pareto: examples, settings, flags, what would make it
fit."""

import dataclasses
import shlex
import subprocess
import sys

import pytest
import yaml

from megatron_autorecompute.cli import main
from megatron_autorecompute.cli.jobs import changed, examples
from megatron_autorecompute.meta.devices import devices
from megatron_autorecompute.meta.job import job_from, load_job, read_description
from megatron_autorecompute.planner.plan import Plan
from tests.support import EXAMPLES

pytestmark = pytest.mark.any_version
ASKED = ["plan", "--example", "llama3-70b", "--gpu", "h100-80gb"]
TINY = {
    "name": "tiny",
    "num_gpus": 1,
    "seq_length": 4096,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "vocab_size": 1024,
    "config": {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8},
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


def test_an_example_is_planned_without_torch_and_without_writing_a_file(tmp_path, capsys):
    words = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {ASKED}; "
    code = "from megatron_autorecompute.cli import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", words + code], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.iterdir())
    assert "--recompute-policy 'full" in ran.stdout
    budget = ran.stdout.partition("Budget ")[2].partition(" GiB")[0]
    carried = str(EXAMPLES / "llama3-70b.h100-80gb.json")
    assert main(["plan", "--profile", carried, "--budget-gib", budget]) == 0
    assert ran.stdout.startswith(capsys.readouterr().out)


def test_a_plan_file_of_an_example_is_planned_again_as_a_profile(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*ASKED, "-o", str(path)]) == 0
    again = capsys.readouterr().out.splitlines()[-1].replace(" GIB", " 60")
    assert main([*shlex.split(again)[1:], "--json"]) == 0
    less = Plan.from_json(capsys.readouterr().out)
    assert less.profile == Plan.load(path).profile
    assert max(stage.peak_high_bytes for stage in less.cost.stages) <= 60 << 30


@pytest.mark.parametrize("name", examples())
def test_a_printed_example_is_a_job_file(name, tmp_path, capsys):
    assert main(["example", name]) == 0
    path = tmp_path / "job.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_job(path) == load_job(EXAMPLES / f"{name}.yaml")


def test_examples_are_listed_a_line_each(capsys):
    assert main(["example"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == examples()


def test_settings_are_what_the_same_lines_in_the_file_are():
    data = read_description(EXAMPLES / "deepseek-v3.yaml")
    given = [("num_gpus", 512), ("config.moe_router_topk", 4), ("num_layers", 61)]
    edited = {**data, "num_gpus": 512}
    edited["config"] = {**data["config"], "moe_router_topk": 4, "num_layers": 61}
    assert changed(data, given, "it") == job_from(edited, "it")
    built = job_from(data, "it")
    assert changed(built, given, "it") == job_from(edited, "it")
    assert changed(built, [], "it") == built


def test_the_pattern_of_a_hybrid_model_can_be_set_with_all_that_follows_from_it():
    data = read_description(EXAMPLES / "nemotron-3-super.yaml")
    del data["config"]["hybrid_layer_pattern"]
    short = changed(
        data | {"config": {**data["config"], "hybrid_layer_pattern": "M"}},
        [("hybrid_layer_pattern", "M*M*"), ("mtp_num_layers", None)],
        "it",
    )
    assert short.num_layers == 4


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "--example"], 2, "--example: invalid choice: '' (choose from"),
        (["plan", "--example", "lama3-70b"], 2, "invalid choice: 'lama3-70b' (choose from"),
        (["plan", "--example", "llama3-70b"], 9, "Add --gpu NAME, which the job runs on: a100"),
        (["plan", "--example", "llama3-70b", "--gpu"], 9, "h100-80gb, h200-141gb,"),
        (["estimate", "--example", "llama3-70b", "-o", "-"], 9, "Add --gpu NAME"),
        (["plan", "--exmaple", "llama3-70b"], 2, "arguments: --exmaple. All flags: megatron-auto"),
        (["plan", "", "--gpu", "h100-80gb"], 9, "Cannot read the job '': No such file"),
        (["plan", "one.yaml", "two.yaml"], 2, "arguments: two.yaml. All flags: megatron-auto"),
        (["plan"], 9, "Say what is planned: --profile P.json, or with --gpu NAME JOB.yaml"),
        ([*ASKED, "--profile", "p.json"], 9, "Leave one or the other out"),
        (["plan", "--profile", "p.json", "--set", "num_gpus=8"], 9, "Leave one or the other out"),
        ([*ASKED, "job.yaml"], 9, "Asked for 2 job descriptions"),
        ([*ASKED, "--num-gpus", "100"], 9, "100 GPUs cannot be divided into groups of"),
        ([*ASKED, "--set", "num_gpus"], 2, "'num_gpus': write NAME=VALUE"),
        ([*ASKED, "--set", "num_gpus=[1"], 2, "'[1' is no value in YAML"),
        ([*ASKED, "--set", "num_gpus=many"], 9, "num_gpus: 'many', must be a valid integer"),
        ([*ASKED, "--set", "num_gpu=64"], 9, "config names num_gpu, which"),
        ([*ASKED, "--set", "config.cp_size=4"], 9, "config names cp_size, which"),
        (["plan", "--profile", str(EXAMPLES / "llama3-70b.h100-80gb.json")], 9, "add --budget-gib"),
        (["pareto", str(EXAMPLES / "llama3-70b.h100-80gb.json")], 9, "Give it as --profile"),
    ],
)
def test_what_cannot_be_meant_is_one_error_that_says_what_to_write(words, code, said, capsys):
    try:
        found = main(words)
    except SystemExit as ended:
        found = ended.code
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, "")
    assert said in captured.err


@pytest.mark.parametrize("verb", ["plan", "pareto", "estimate", "profile"])
def test_help_lists_every_gpu_and_every_example(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out.replace("-\n", "-")
    assert all(name in " ".join(text.split()) for name in (*devices(), *examples()))


def test_pareto_takes_a_job_as_plan_does(capsys):
    assert main(["pareto", *ASKED[1:], "--points", "1", "--json"]) == 0
    of_job = capsys.readouterr().out
    carried = str(EXAMPLES / "llama3-70b.h100-80gb.json")
    assert main(["pareto", "--profile", carried, "--points", "1", "--json"]) == 0
    assert capsys.readouterr().out == of_job


def test_a_job_that_does_not_fit_is_told_what_would_make_it_fit(tiny, capsys):
    pytest.importorskip("megatron.core")
    words = ["plan", tiny, "--gpu", "h100-80gb", "--budget-gib", "1.4"]
    assert main(words) == 3
    assert "  - micro-batch size 1 instead of 4" in capsys.readouterr().err
    assert main([*words, "--set", "micro_batch_size=1", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.profile.parallelism.micro_batch_size == 1
    asked = plan.profile.model.facts["job"]
    assert dataclasses.asdict(load_job(tiny)) == {**asked, "micro_batch_size": 4}
