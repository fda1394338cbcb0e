"""Bridge's own `pretrain` on CPU through `bridge_pretrain`, with and without a policy."""

import os
import re
import subprocess
import sys

import pytest

from megatron_autorecompute.planner.plan import Plan
from tests.bridge import recipes
from tests.forks import Forks, free_port

RECIPE = "tests/bridge/recipes.py:"
LLAMA, MOE = RECIPE + "tiny_llama_pretrain_config", RECIPE + "tiny_moe_pretrain_config"
NUM_STEPS = 14
STEPS = f"train.train_iters={NUM_STEPS}"
FEWER = ("--recompute-measure-steps", "8")
"""The fewest in which every phase of measuring has one."""
AUTO = ("model.recompute_policy=auto", *FEWER, "--recompute-memory-budget-gib")

LAUNCHED = "megatron_autorecompute.bridge_pretrain"
ENVIRONMENT = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def train(recipe, *arguments, ranks=1):
    """What the run under torchrun printed; an error of the run is an error here."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-port", str(free_port())]
    command = ["-m", "testing.bridge_launch", LAUNCHED, "--recipe", recipe]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, *command, STEPS, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def fork():
    """`train` in forks of one process that has imported Bridge."""
    with Forks("tests.bridge.many", ENVIRONMENT) as forks:

        def run(recipe, *arguments, ranks=1):
            job = {"ranks": ranks, "arguments": ["--recipe", recipe, STEPS, *arguments]}
            (ended,) = forks.run(job, timeout_s=400)
            assert not any(ended.codes), ended.text[-6000:]
            return ended.text

        yield run


def learned(output):
    """Loss and gradient norm of every step as printed, and the digest of all weights."""
    losses = re.findall(r"iteration +\d+/.*lm loss: (\S+) .*grad norm: (\S+)", output)
    weights = sorted(re.findall(r"weights of rank \d+: \S+", output))
    assert len(losses) == NUM_STEPS
    assert weights
    return losses, weights


@pytest.fixture(scope="module")
def without(fork):
    return learned(fork(LLAMA))


def test_a_mixed_policy_trains_to_the_same_bits(without):
    output = train(LLAMA, "model.recompute_policy=none,full,selective[core_attn+mlp],none")
    assert learned(output) == without
    assert "recompute_policy: ['none', 'full', 'selective[core_attn+mlp]', 'none']" in output


def test_auto_measures_decides_and_learns_the_same_bits(without, fork, tmp_path):
    path = tmp_path / "plan.json"
    keep = ("--recompute-plan-path", str(path))
    output = fork(LLAMA, *AUTO, "0.0036", *keep)
    assert learned(output) == without
    assert "recompute auto: measuring" in output
    assert "to keep this policy without measuring" in output
    plan = Plan.load(path)
    assert plan.profile.fingerprint["model"] == "GPTModel"
    # Bridge's timers ran in the measured step although its level is 0, and the table shows them.
    (rank,) = plan.profile.measured_step.ranks
    times = rank.forward_compute_ms, rank.backward_compute_ms, rank.optimizer_ms
    row = output.split("rank/ forward:")[1].split("0/0")[1].split()
    assert [row[1], row[3], row[4]] == [f"{ms:,.1f}" if ms < 1000 else f"{ms:,.0f}" for ms in times]
    assert "full" in plan.policy.format() or "selective" in plan.policy.format()
    again = fork(LLAMA, *AUTO, "0.0036", *keep)
    assert learned(again) == without
    assert "running the plan" in again
    assert "recompute auto: measuring" not in again
    fixed = fork(LLAMA, f"model.recompute_policy=@{path}")
    assert learned(fixed) == without


def test_plan_only_prints_the_plan_and_stops(fork, tmp_path):
    save = f"checkpoint.save={tmp_path}"
    output = fork(LLAMA, *AUTO, "1", "--recompute-plan-only", save)
    assert f"iteration {NUM_STEPS:8}/" not in output
    assert "ms a step" in output
    assert (tmp_path / "recompute-plan.json").exists()


def test_auto_on_two_pipeline_stages_learns_the_same_bits(fork):
    two = "model.pipeline_model_parallel_size=2"
    plain = learned(fork(MOE, two, ranks=2))
    output = fork(MOE, two, *AUTO, "0.006", ranks=2)
    assert learned(output) == plain
    assert "recompute auto: running a plan for all of the slack" in output


# --- what is refused, in this process -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--recipe", "llama3_9b_pretrain_config"], 9, "llama3_8b_pretrain_config"),
        (["--recipe", "nowhere.py:recipe"], 9, "There is no recipe file nowhere.py"),
        (["--recipe", RECIPE + "recipe"], 9, "tiny_moe_pretrain_config"),
        (["--recipe", LLAMA, "--peft_scheme", "lora"], 9, "takes none"),
        (["--recipe", LLAMA, "--mode", "finetune"], 9, "checkpoint.pretrained_checkpoint=PATH"),
        (["--recipe", LLAMA, "--recompute-plan-only"], 9, "only auto uses that"),
        (["--recipe", LLAMA, "--recompute-run-on-cpu"], 9, "on CUDA devices only"),
        (["--recipe", LLAMA, "model.recompute_policy=full*3"], 2, "the model has 4"),
        (["--recipe", LLAMA, "model.recompute_policy=@no.json"], 2, "Cannot read the policy file"),
        (["--recipe", LLAMA, "--tp", "2"], 2, "neither a flag nor an override"),
    ],
)
def test_bad_input_ends_with_one_message_and_its_code(
    bridge, arguments, code, said, capsys, monkeypatch
):
    from megatron_autorecompute.bridge_pretrain import main

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    assert said in capsys.readouterr().err


def test_with_no_policy_bridges_pretrain_is_called_with_nothing_added(bridge, monkeypatch):
    from megatron.bridge.training import pretrain

    from megatron_autorecompute.integrations import megatron_bridge

    seen = []
    monkeypatch.setattr(pretrain, "pretrain", lambda *args: seen.append(args))
    cfg = recipes.tiny_llama_pretrain_config()
    before = repr(cfg)
    megatron_bridge.pretrain(cfg, train)
    assert seen == [(cfg, train, [])]
    assert repr(cfg) == before
    assert cfg.model.pre_wrap_hook is None


@pytest.mark.parametrize(
    ("choices", "fields"),
    [("megatron", ("full", "uniform", 1, None)), ("all", (None, None, None, ["full"] * 4))],
)
def test_a_policy_of_megatrons_choices_is_in_megatrons_fields(bridge, monkeypatch, choices, fields):
    from megatron.bridge.training import pretrain

    from megatron_autorecompute.integrations import megatron_bridge
    from megatron_autorecompute.runtime.auto_options import AutoOptions

    monkeypatch.setattr(pretrain, "pretrain", lambda *args: None)
    model = (cfg := recipes.tiny_llama_pretrain_config()).model
    megatron_bridge.set_policy(model, "full")
    megatron_bridge.pretrain(cfg, train, options=AutoOptions(recompute_choices=choices))
    found = model.recompute_granularity, model.recompute_method, model.recompute_num_layers
    assert (*found, model.recompute_policy) == fields
