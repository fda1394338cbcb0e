"""What commands print: profiles, speed, units, assumptions, colours, progress."""

import json
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_autorecompute import __version__
from megatron_autorecompute.cli import main
from megatron_autorecompute.cli.program import COMMANDS
from megatron_autorecompute.cli.throughput import throughput_words
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, Profile, StageRecord, StaticBytes
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"
LLAMA, MOE = str(PROFILES / "llama3-70b.json"), str(PROFILES / "moe-16b.json")
COMMAND = [sys.executable, "-m", "megatron_autorecompute"]
PLAN = ["plan", "--profile", LLAMA, "--pp", "4", "--num-microbatches", "8", "--budget-gib", "28"]
GIB = 1 << 30


def out(words, capsys):
    assert main(words) == 0
    return capsys.readouterr().out


def on_a_terminal(*words, **environ):
    """What a command writes to standard output and to standard error, both terminals."""
    ends = {name: pty.openpty() for name in ("stdout", "stderr")}
    ran = subprocess.Popen(
        [*COMMAND, *words],
        env={**os.environ, "TERM": "xterm", **environ},
        **{name: ends[name][1] for name in ends},
    )
    for _, end in ends.values():
        os.close(end)
    with ThreadPoolExecutor() as readers:  # a terminal holds little that nobody reads
        read = dict(zip(ends, readers.map(_all_of, [one for one, _ in ends.values()]), strict=True))
    for terminal, _ in ends.values():
        os.close(terminal)
    assert ran.wait() == 0
    return read


def _all_of(terminal):
    found = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed, and everything is read
            return found.decode()
        if not part:
            return found.decode()
        found += part


# ------------------------------------------------------------------------------- show a profile


def test_show_says_what_a_profile_is(capsys):
    text = out(["show", MOE], capsys)
    assert text.startswith("moe-16b: 28 layers; modelled, not measured\n")
    assert "micro-batch 1, sequence 4096, ep 8, pipeline not known" in text
    assert "Records: 9 (assumed)" in text
    profile = Profile.load(MOE)
    for kind in profile.kinds:
        for record in kind.choices:
            (line,) = [
                line
                for line in text.splitlines()
                if line.startswith(f"{len(kind.layers)} {kind.name} ")
                and f" {record.choice} " in line
            ]
            held = f"{record.held_bytes / 2**20:.0f}"
            assert line.split()[3:][0] == held
            assert line.split()[-1] == f"{record.backward_ms:.2f}"


def test_show_json_of_a_profile_is_the_profile(capsys):
    assert Profile.from_json(out(["show", MOE, "--json"], capsys)) == Profile.load(MOE)


def test_a_measured_profile_is_said_to_be_measured(tmp_path, capsys):
    data = json.loads(Path(LLAMA).read_text())
    for kind in data["kinds"]:
        for record in kind["choices"]:
            record["source"] = "measured"
    data["fingerprint"] = {"device": "NVIDIA H100 80GB HBM3"}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(data))
    text = out(["show", str(path)], capsys)
    assert "llama3-70b: 80 layers; measured\n" in text
    assert "NVIDIA H100 80GB HBM3" in text


def test_stages_with_equal_static_bytes_are_one_row(tmp_path, capsys):
    layout = Layout.from_flags(80, 8)
    sizes = [5, 4, 4, 4, 4, 4, 4, 5]
    stages = tuple(
        StageRecord(chunks[0].layers, StaticBytes(size * GIB))
        for size, chunks in zip(sizes, layout.stages, strict=True)
    )
    path = tmp_path / "profile.json"
    replace(Profile.load(LLAMA), stages=stages).save(path)
    text = out(["show", str(path)], capsys)
    rows = [line.split() for line in text.splitlines()]
    assert ["0,", "7", "5.00", "0.00", "0.00", "0.00", "5.00"] in rows
    assert ["1-6", "4.00", "0.00", "0.00", "0.00", "4.00"] in rows
    assert "8 stages" in text


# ------------------------------------------------------------------------------------ assumptions


@pytest.mark.parametrize("words", [["show", LLAMA], PLAN])
def test_assumptions_are_counted_and_listed_on_request(words, capsys):
    number = len(Profile.load(LLAMA).assumptions)
    short = out(words, capsys)
    assert f"Rests on {number} assumptions; -v lists them." in short
    assert "Assumes:" not in short
    assert out([*words, "-v"], capsys).count("Assumes:") == number


# ------------------------------------------------------------------------------------------ speed


def planned(facts=None, fingerprint=None):
    profile = Profile.load(LLAMA)
    model = replace(profile.model, facts=facts or {})
    profile = replace(profile, model=model, fingerprint=fingerprint or {})
    return make_plan(Problem(profile, Layout.from_flags(80, 4), Schedule(4, 1, 8)).at(40 * GIB))


CONFIG = {
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "gated_linear_unit": True,
}


def test_speed_is_that_of_the_step_and_mfu_of_the_devices_peak():
    plan = planned(
        {"transformer_config": CONFIG, "vocab_size": 128256},
        {"device": "NVIDIA H100 80GB HBM3", "world_size": "64"},
    )
    tokens_per_s = 8 * 8192 / (plan.cost.step_ms / 1000)
    # 70.6e9 weights, 6 operations each, and causal attention: 6 * 80 * 8192 * 8192
    weights = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 8192 * 128256
    flops_per_s = (6 * weights + 6 * 80 * 8192 * 8192) * tokens_per_s / 32  # tp 8, pp 4
    said = throughput_words(plan)
    assert f"{2 * tokens_per_s:,.0f} tokens/s on 64 GPUs" in said
    assert f"{flops_per_s / 1e12:,.0f} TFLOP/s per GPU" in said
    assert f"MFU {flops_per_s / 989.4e12:.1%} (of 989 bf16 TFLOP/s)" in said


def test_without_a_known_device_there_is_no_mfu():
    said = throughput_words(planned({"transformer_config": CONFIG, "vocab_size": 128256}))
    assert "TFLOP/s per GPU" in said
    assert "tokens/s per GPU" in said
    assert "MFU" not in said


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"transformer_config": {"num_layers": 80}, "vocab_size": 128256},
        {"transformer_config": CONFIG},
        {"job": {"of": "another version"}},
    ],
)
def test_without_a_whole_config_there_are_tokens_and_the_bubble(facts):
    plan = planned(facts, {"device": "h100-80gb"})
    share = plan.cost.bubble_ms / plan.cost.step_ms
    said = throughput_words(plan)
    assert said.startswith(f"Bubble {share:.1%} of the step, ")
    assert "tokens/s per GPU" in said
    assert "FLOP" not in said


def test_plan_and_show_print_the_speed(tmp_path, capsys):
    path = tmp_path / "plan.json"
    text = out([*PLAN, "-o", str(path)], capsys)
    assert "Bubble " in text
    assert "; times are modelled." in " ".join(text.split())
    assert out(["show", str(path)], capsys) == text


# --------------------------------------------------------------------------------- units, colours


def test_a_small_model_is_shown_in_mib(tmp_path, capsys):
    mib = 1 << 20
    none = ChoiceRecord("none", 30 * mib, mib, mib, 1.0, 2.0)
    profile = uniform_profile(4, none, ChoiceRecord("full", mib, mib, 30 * mib, 1.0, 3.0))
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    profile.save(path)
    shape = ["--profile", str(path), "--pp", "2", "--num-microbatches", "4"]
    text = out(["plan", *shape, "--budget-gib", "0.5", "-o", str(plan)], capsys)
    assert "peak MiB" in text
    assert " 512.0 " in text
    for words in (
        ["explain", str(plan)],
        ["pareto", *shape],
    ):
        text = out(words, capsys)
        assert "MiB" in text
        assert "GiB" not in text


def test_no_color_means_no_bold():
    assert "\x1b[1m" in on_a_terminal("show", MOE, NO_COLOR="")["stdout"]
    assert "\x1b[" not in on_a_terminal("show", MOE, NO_COLOR="1")["stdout"]


def test_plan_shows_how_far_it_is_on_a_terminal_only():
    assert "Stages" in on_a_terminal(*PLAN)["stderr"]
    quiet = subprocess.run([*COMMAND, *PLAN], capture_output=True, check=True)
    assert quiet.stderr == b""


# ------------------------------------------------------------------------------------ the program


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron-autorecompute {__version__}\n"


@pytest.mark.parametrize("heavy", ["numpy", "rich", "scipy", "highspy", "pydantic", "torch"])
def test_help_imports_nothing_heavy(heavy):
    code = (
        f"import sys; sys.modules[{heavy!r}] = None; from megatron_autorecompute.cli import main; "
        "main(['--help'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"compare"}))  # which loads Megatron
def test_the_help_of_a_command_needs_no_scipy(name):
    code = (
        "import sys; sys.modules['scipy'] = None; from megatron_autorecompute.cli import main; "
        f"main([{name!r}, '--help'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# ------------------------------------------------------------------------------ blocks by name


def test_plan_and_show_name_a_towers_layers_which_are_on_the_first_stage(tmp_path, capsys):
    plain, path, plan = uniform_profile(7, NONE, FULL), tmp_path / "p.json", tmp_path / "plan.json"
    model = replace(plain.model, encoder_layers=3, encoder_name="vision")
    replace(plain, model=model).save(path)
    words = ["--profile", str(path), "--pp", "2", "--num-microbatches", "4"]
    said = out(["plan", *words, "--budget-gib", str(900 / GIB), "-o", str(plan)], capsys)
    made = json.loads(plan.read_text())
    layers = [[chunk["layers"] for chunk in stage] for stage in made["layout"]["stages"]]
    assert layers == [[[0, 1, 2, 3, 4]], [[5, 6]]]  # two of the decoder's four on each
    # Two microbatches hold 100 bytes a layer on stage 0: with five layers 1,000, with four 808.
    policy = RecomputePolicy.from_config(made["recompute_policy"], num_layers=7)
    assert [str(choice) for choice in policy.layers].count("full") == 1
    assert all(str(choice) == "none" for choice in policy.layers[5:])
    text = policy.format({"vision": 3, "decoder": 4})
    assert text.startswith("vision:")
    assert f"--recompute-policy '{text}'" in said.replace("\n", "")
    assert f"--recompute-policy '{text}'" in out(["show", str(plan)], capsys).replace("\n", "")
    assert main(["plan", *words, "--budget-gib", "1", "--search-layout"]) != 0
    assert "(vision, 3 layers) are not searched" in " ".join(capsys.readouterr().err.split())


def test_flags_of_a_plan_are_words_of_a_shell(tmp_path, capsys):
    problem = Problem(
        uniform_profile(4, NONE, FULL), Layout.from_flags(4, 1), Schedule(1, 1, 1), GIB
    )
    path = tmp_path / "plan.json"
    make_plan(problem, megatron_flags={"--x;rm $(id)": "a|b"}).save(path)
    assert "Set '--x;rm $(id)' 'a|b'" in out(["show", str(path)], capsys)
