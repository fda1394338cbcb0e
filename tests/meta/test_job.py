"""Job descriptions, devices and static bytes: needs no torch, but for the dimensions in use."""

import csv
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_autorecompute.cli import estimate
from megatron_autorecompute.cli.jobs import read_job
from megatron_autorecompute.errors import OptionError, PipelineError
from megatron_autorecompute.meta.devices import device, devices
from megatron_autorecompute.meta.job import job_from, load_job
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.static_bytes import deepep_bytes, outside_torch
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.units import GIB

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "megatron_autorecompute" / "examples"


def job(config=None, **fields):
    needed = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, **(config or {})}
    data = {
        "name": "tiny",
        "config": needed,
        "num_gpus": 8,
        "seq_length": 128,
        "global_batch_size": 16,
        "vocab_size": 1000,
        **fields,
    }
    return job_from(data, "this job")


def test_buffers_of_fixed_size_for_routed_tokens_are_those_of_hybridep():
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    fixed = {**MOE, **flex, "moe_expert_rank_capacity_factor": 1.5}
    assert job(fixed).resolved.moe_expert_rank_capacity_factor == 1.5
    with pytest.raises(OptionError, match="capacity_factor without moe_token_dispatcher_type flex"):
        job({**fixed, "moe_flex_dispatcher_backend": "deepep"})
    with pytest.raises(OptionError, match=r"capacity_factor: 0\.9, must be ≥ 1"):
        job({**fixed, "moe_expert_rank_capacity_factor": 0.9})
    with pytest.raises(OptionError, match="moe_imbalance beside moe_expert_rank_capacity_factor"):
        job(fixed, moe_imbalance={"99": 2.0})
    stash = {"moe_paged_stash": True, "moe_paged_stash_buffer_size_factor_cuda": -0.5}
    with pytest.raises(OptionError, match="factor_cuda below 1"):
        job({**fixed, **stash})


@pytest.mark.parametrize("name", ["optimizer_cpu_offload", "use_megatron_fsdp", "use_torch_fsdp2"])
def test_a_setting_that_is_not_modelled_is_refused_with_its_reason(name):
    for given in ({"config": {name: True}}, {name: True}):
        with pytest.raises(OptionError, match=f"this job: {name}: .* is not modelled"):
            job(**given)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_job_whose_ranks_and_layers_add_up(path):
    example = load_job(path)
    assert example.layout().num_layers == example.num_layers
    assert example.schedule().num_microbatches * example.data_parallel == (
        example.global_batch_size // example.micro_batch_size
    )


def test_reading_a_job_needs_no_torch():
    code = (
        "import sys; from megatron_autorecompute.cli import estimate; "
        "from megatron_autorecompute.meta import devices, job, static_bytes; "
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelt_field_is_named():
    with pytest.raises(OptionError, match="sequence_length: 128, Unexpected keyword argument"):
        job(sequence_length=128)


def test_a_field_of_a_wrong_value_is_named_with_what_was_found_and_what_may_be_there():
    with pytest.raises(OptionError) as caught:
        job(micro_batch_size=0, precision="fp7", global_batch_size=2.5)
    said = str(caught.value)
    assert "  micro_batch_size: 0, must be ≥ 1\n" in said
    assert "  global_batch_size: 2.5, must be a valid integer" in said
    assert "  precision: 'fp7', must be 'bf16', 'fp8', 'fp8_block', 'mxfp8' or 'nvfp4'" in said


MOE = {"num_moe_experts": 8}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_layers": 32.5}, "config.num_layers: 32.5, must be a valid integer"),
        ({"num_layers": 10**9}, "config.num_layers: 1000000000, must be ≤ 4096"),
        ({"num_layers": True}, "config.num_layers: True, must be a valid integer"),
        ({"hidden_size": 0}, "config.hidden_size: 0, must be ≥ 1"),
        ({"hidden_size": "64"}, "config.hidden_size: '64', must be a valid integer"),
        ({"tensor_model_parallel_size": 0}, "config.tensor_model_parallel_size: 0, must be ≥ 1"),
        ({"activation_func": "relu6"}, "config.activation_func: 'relu6', must be 'gelu', 'silu'"),
        ({"normalization": "rmsnorm"}, "config.normalization: 'rmsnorm', must be 'LayerNorm' or"),
        ({**MOE, "moe_layer_freq": 0}, "config.moe_layer_freq.constrained-int: 0, must be ≥ 1"),
        ({"window_attn_skip_freq": [2]}, "[0]: 2, must be 0 or 1"),
        ({"gated_linear_unit": "yes"}, "config.gated_linear_unit: 'yes', must be a valid boolean"),
        ({"pipeline_model_parallel_layout": 3}, "layout.str: 3, must be a valid string"),
        ({"cp_comm_type": "ring"}, "config.cp_comm_type: 'ring', must be 'p2p', 'a2a'"),
        ({"cuda_graph_modules": ["attention"]}, "cuda_graph_modules[0]: 'attention', must be"),
    ],
)
def test_a_config_that_is_no_models_is_refused_by_field(config, said):
    with pytest.raises(OptionError, match="describes no model that can be built") as caught:
        job(config)
    assert said in str(caught.value)


WIDE = {"ffn_hidden_size": 256, "tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_query_groups": 3}, "num_attention_heads 4 is no multiple of num_query_groups 3"),
        ({**WIDE, "ffn_hidden_size": 129}, "no multiple of the tensor parallel size"),
        ({**MOE, **WIDE, "moe_ffn_hidden_size": 129}, "no multiple of the tensor parallel size"),
        (
            {**MOE, **WIDE, "moe_shared_expert_intermediate_size": 33},
            "no multiple of the tensor parallel size",
        ),
        ({"bf16": False}, "neither bf16 nor fp16: training in fp32 is not modelled"),
        ({"fp8": "hybrid"}, "precision bf16, and fp8, fp4 and fp8_recipe in config say fp8"),
        ({"fp4": "e2m1"}, "precision bf16, and fp8, fp4 and fp8_recipe in config say nvfp4"),
        ({**MOE, "moe_layer_freq": [1]}, "lists more or fewer than 8 layers"),
        ({"window_attn_skip_freq": [0]}, "lists more or fewer than 8 layers"),
        ({"context_parallel_size": 3}, "seq_length 128 is no multiple of 6, twice context_paral"),
        (
            {"cp_comm_type": "a2a+p2p", "context_parallel_size": 2},
            "hierarchical_context_parallel_sizes whose product is context_parallel_size",
        ),
    ],
)
def test_fields_that_go_together_nowhere_are_refused(config, said):
    with pytest.raises(OptionError, match="cannot be modelled") as caught:
        job(config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "config", [{"hidden_size": float("nan")}, {"hidden_dropout": float("inf")}]
)
def test_a_number_that_is_none_is_refused(config):
    with pytest.raises(OptionError, match="Out of range float values"):
        job(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, "First dimension of the te"),
        ({**MOE, "moe_ffn_hidden_size": 64, "moe_router_topk": 9}, "k not in range"),
    ],
)
def test_what_megatron_cannot_run_is_refused_in_its_words(config, said):
    asked = job(config, seq_length=127)
    with pytest.raises(OptionError, match="Megatron cannot run this model") as caught:
        profile_job(asked, device("h100-80gb"), only=())
    assert said in str(caught.value)


def test_ep_overlap_without_ep_is_refused_in_megatrons_words_before_anything_is_built():
    experts = {**MOE, "moe_ffn_hidden_size": 64}
    asked = job({**experts, "overlap_moe_expert_parallel_comm": True})
    with pytest.raises(OptionError, match="only supported with expert model parallelism"):
        profile_job(asked, device("h100-80gb"), progress=lambda said: pytest.fail(said))


def test_a_recipe_of_fp8_is_that_of_the_precision():
    assert job({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, precision="mxfp8")
    assert job({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, precision="fp8")
    with pytest.raises(OptionError, match="precision fp8, and fp8, fp4 and fp8_recipe in config"):
        job({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, precision="fp8")


def test_what_bridge_replaces_at_the_start_of_a_job_is_not_compared():
    assert job({"bf16": False, "fp8": "hybrid"}, described_by="recipe")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "recursion"),
        ("a: " + "9" * 5000, "Cannot read the job"),
        ("a: 2024-99-99", "month must be in"),
        ("a: 2024-01-01", "not JSON serializable"),
        ("a: &a [*a]", "Circular reference"),
        ("a: !!bool x", "Cannot read the job"),
        ("a: !!set {b}", "not JSON serializable"),
        ("\0", "Cannot read the job"),
        ("? [a]\n: 1", "unhashable"),
        ('"a\\nb": 1', r"'a\nb': "),
        ("num_gpu: 8", "num_gpu: 8, Unexpected keyword argument"),
        ("num_gpus: 8\nname: x\nnum_gpus: 16", "the key 'num_gpus' is given twice"),
        ("config:\n  num_layers: 4\n  num_layers: 8", "line 3, column 3"),
        ("[1, {a: {b: 1, b: 1}}]", "the key 'b' is given twice"),
    ],
)
def test_a_file_that_is_no_plain_data_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        load_job(path)
    assert said in str(caught.value)
    assert "<unicode string>" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_key_that_is_merged_and_given_is_given_once_and_a_mark_before_the_text_is_none_of_it(
    tmp_path,
):
    sizes = "{num_layers: 4, hidden_size: 64, num_attention_heads: 4}"
    rest = "name: tiny\nnum_gpus: 1\nseq_length: 8\nglobal_batch_size: 1\nvocab_size: 64\n"
    path = tmp_path / "job.yaml"
    path.write_text(f"\ufeffconfig: {{<<: {sizes}, num_layers: 2}}\n{rest}", encoding="utf-8")
    assert load_job(path).config["num_layers"] == 2


def test_a_field_of_no_value_is_as_if_it_were_left_out():
    assert all(job({**MOE, "moe_layer_freq": None}).moe_pattern())
    assert "tensor_model_parallel_size" not in job({"tensor_model_parallel_size": None}).config


def test_missing_dimensions_are_named():
    with pytest.raises(
        OptionError,
        match=r"config.num_layers: missing, must be given\n  config.hidden_size: missing",
    ):
        job_from(
            {
                "name": "x",
                "config": {"num_attention_heads": 2},
                "num_gpus": 1,
                "seq_length": 8,
                "global_batch_size": 1,
                "vocab_size": 8,
            },
            "this job",
        )


@pytest.mark.parametrize("stated", [{"p99": 1.2}, {"101": 1.2}, {"99": 0.9}])
def test_imbalance_is_a_factor_from_1_on_at_a_percentile(stated):
    with pytest.raises(OptionError, match=r"moe_imbalance"):
        job({"num_moe_experts": 8}, moe_imbalance=stated)


def test_imbalance_without_experts_is_refused():
    assert job({"num_moe_experts": 8}, moe_imbalance={"99.9": 1.2}).moe_imbalance == {"99.9": 1.2}
    with pytest.raises(OptionError, match="moe_imbalance without num_moe_experts"):
        job(moe_imbalance={"99": 1.2})


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(OptionError, match="8 GPUs cannot be divided into groups of 3"):
        job({"tensor_model_parallel_size": 3})


def test_experts_need_enough_gpus_on_every_stage():
    config = {"num_moe_experts": 8, "expert_model_parallel_size": 8}
    config["pipeline_model_parallel_size"] = 2
    with pytest.raises(OptionError, match=r"8 GPUs cannot be divided into groups of 16 \(expert"):
        job(config)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(OptionError, match="global_batch_size 12 is no multiple"):
        job(global_batch_size=12)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pipeline_model_parallel_size": 8, "num_layers": 9}, "9 layers cannot be divided evenly"),
        (
            {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 4},
            "cannot be divided evenly among 4 chunks",
        ),
        (
            {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
            "microbatches",
        ),
    ],
)
def test_layers_and_microbatches_that_no_pipeline_takes_are_refused(fields, said):
    with pytest.raises(PipelineError, match=said):
        job(fields, global_batch_size=6 if said == "microbatches" else 16)


def test_vocabulary_is_padded_to_a_multiple_for_every_tensor_rank():
    assert job({"tensor_model_parallel_size": 4}).padded_vocab_size == 1024
    assert job().padded_vocab_size == 1024
    assert job(vocab_size=1025).padded_vocab_size == 1152


def test_layout_is_megatrons():
    found = job({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3})
    expected = Layout.from_flags(8, 2, num_layers_in_first_pipeline_stage=3)
    assert found.layout() == expected


NAMES = {
    **{"L": "num_layers", "h": "hidden_size", "ffn": "ffn_hidden_size", "topk": "moe_router_topk"},
    **{"heads": "num_attention_heads", "kv": "num_query_groups", "hd": "kv_channels"},
    **{"E": "num_moe_experts", "moe_ffn": "moe_ffn_hidden_size"},
    **{"q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "nope": "qk_head_dim"},
    **{"rope": "qk_pos_emb_head_dim", "v": "v_head_dim"},
}
"""Names in the recipes' column model_dims_public."""


def test_the_dimensions_in_the_table_of_recipes_are_those_used(recipes_script):
    with open(ROOT / "benchmarks" / "data" / "nvidia_tuned_recipes.csv", newline="") as file:
        rows = {row["model"]: row["model_dims_public"] for row in csv.DictReader(file)}
    for model, text in rows.items():
        known = recipes_script.MODELS[model]
        said = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
        assert said.pop("vocab") == known.vocab_size
        shared = said.pop("shared", 0)
        experts = known.config.get("moe_shared_expert_intermediate_size", 0)
        assert experts == shared * said.get("moe_ffn", 0)
        assert {NAMES[name]: value for name, value in said.items()}.items() <= known.config.items()


@pytest.fixture(scope="module")
def recipes_script():
    from scripts import nvidia_recipes

    return nvidia_recipes


def test_nine_tenths_of_nvidias_recipes_are_in_the_table_and_none_is_slower():
    with open(ROOT / "benchmarks" / "data" / "nvidia_tuned_recipes.csv", newline="") as file:
        recipes = [row["recipe"] for row in csv.DictReader(file)]
    page = (ROOT / "benchmarks/results/nvidia_recipes.md").read_text(encoding="utf-8")
    covered, rest = page.split("## Not covered")
    rows = [line.split(" | ") for line in covered.splitlines() if "gpu_" in line]
    names = {row[0].removeprefix("| ") for row in rows}
    assert len(names) >= 0.9 * len(recipes)
    for recipe in recipes:
        assert recipe.removesuffix("_config") in names or f"| {recipe} |" in rest
    assert not [row for row in rows if row[9].startswith("-")]


@pytest.mark.filterwarnings("ignore:Using a large number of experts")
def test_peaks_of_qwen3_are_those_that_nvidia_measured(recipes_script):
    runs = [run for run in recipes_script.measured_runs() if run[0].startswith("Qwen3")]
    assert len(runs) == 3
    for _, asked, modules, measured_gb in runs:
        found = profile_job(asked, device("h100-80gb"), only=[modules] if modules else ())
        model = Problem(found, asked.layout(), asked.schedule())
        text = f"megatron:selective[{modules}]" if modules else "megatron:none"
        (stage,) = recipes_script.evaluated(model, text).stages
        assert stage.peak.bytes == pytest.approx(1e9 * measured_gb, rel=0.005)


# ------------------------------------------------------------------------------------ devices


def test_every_device_names_its_source():
    assert {"a100-80gb", "h100-80gb", "h200-141gb"} <= set(devices())
    assert all("NVIDIA" in found.source for found in devices().values())


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(OptionError, match=r"Unknown GPU 'tpu'. Known: a100-80gb, h100-80gb"):
        device("tpu")


def test_an_a100_has_no_fp8():
    with pytest.raises(OptionError, match="a100-80gb has no fp8 arithmetic"):
        device("a100-80gb").rate("fp8")


def test_a_hopper_has_fp8_but_no_mxfp8():
    device("h100-80gb").check("fp8_block")
    device("b200-180gb").check("mxfp8")
    with pytest.raises(OptionError, match="h100-80gb has no mxfp8 arithmetic"):
        device("h100-80gb").check("mxfp8")


# ------------------------------------------------------------------------------------ command


def test_default_reserve_is_2_gib_and_a_twentieth():
    gpu = device("h100-80gb")
    kept_back = round(2 * GIB + 0.05 * gpu.memory_bytes)
    assert estimate.default_budget_bytes(gpu, None, job()) == gpu.memory_bytes - kept_back
    assert estimate.default_budget_bytes(gpu, 9.1, job()) == gpu.memory_bytes - round(9.1 * GIB)


def test_a_reserve_larger_than_the_device_is_refused():
    with pytest.raises(OptionError, match="leaves nothing of h100-80gb"):
        estimate.default_budget_bytes(device("h100-80gb"), 100.0, job())


def moe_job(experts, ranks, dispatcher, **config):
    sizes = {"num_moe_experts": experts, "expert_model_parallel_size": ranks}
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": dispatcher}
    chosen = {} if dispatcher == "alltoall" else flex
    return job({**sizes, **chosen, **config}, num_gpus=ranks, global_batch_size=ranks)


def test_an_all_to_all_of_experts_is_kept_back_as_it_was_measured():
    gpu = device("h100-80gb")

    def outside_gb(*args):
        return outside_torch(moe_job(*args), gpu)[0] / 1e9

    measured_gb = 4.34 - 1.06  # NVIDIA/nccl issue 1685: 8 H100s in one node
    assert outside_gb(64, 8, "alltoall") == pytest.approx(2 * GIB / 1e9 + measured_gb)
    # Megatron-LM pull request 6429: 64 H100s.
    assert outside_gb(64, 16, "alltoall") == pytest.approx(6403 * 2**20 / 1e9)
    assert outside_gb(64, 1, "alltoall") == 2 * GIB / 1e9
    assert "the experts' all-to-all" in estimate.budget_words(gpu, None, moe_job(64, 8, "alltoall"))


def test_buffers_of_deepep_and_hybridep_have_the_sizes_of_their_sources():
    # docs/legacy.md of DeepEP names none; config.hpp by hand, hidden 7168 on 8 and on 64 ranks.
    token = 7168 * 2 + 8 + 128 * 8 + 128 * 4 + 128 * 4
    nvlink = 10 * 8 * (5 * 4 + 256 * token)
    assert deepep_bytes(7168, 8) == -(-nvlink // 128) * 128
    # 16 ranks: 128 tokens between nodes are 140, a multiple of the 20 that are sent at once.
    nvlink = 10 * 8 * (7 * 4 + 288 * token)
    between = 10 * 2 * 2 * (18 * 4 + 140 * (token + 16))
    assert deepep_bytes(7168, 16) == sum(-(-part // 128) * 128 for part in (nvlink, between))
    assert deepep_bytes(7168, 8, 24) == pytest.approx(1.2 * deepep_bytes(7168, 8), rel=1e-6)
    gpu = device("gb200-186gb")
    asked = moe_job(256, 64, "hybridep", hidden_size=7168)
    shared = 64 * 128 * (2 * 7168 + 4 * 4 * 64 + 4 * 56)  # one domain, 128 tokens a rank
    assert outside_torch(asked, gpu)[0] == 2 * GIB + shared
    assert outside_torch(asked, device("h100-80gb"))[0] > 2 * GIB + 64 * 128 * 2 * 7168


def test_efficiency_is_read_over_the_defaults():
    gpu = device("h100-80gb")
    assert estimate.read_efficiency("gemm=0.5", gpu) == replace(gpu.reaches, gemm=0.5)
    assert estimate.read_efficiency(None, gpu) == gpu.reaches
    slow = estimate.read_efficiency("host=2,gemm=0.5", gpu)
    assert slow == replace(gpu.reaches, gemm=0.5).with_host(2)
    assert slow.host_us == 2 * gpu.reaches.host_us


@pytest.mark.parametrize(
    "text", ["gemm=0", "gemm=1.5", "speed=0.5", "gemm", "gemm=x", "host=0", "host=101", "host=nan"]
)
def test_an_efficiency_that_cannot_be_is_refused(text):
    with pytest.raises(OptionError, match=r"names are gemm, gemm_quantised, .*, link, network"):
        estimate.read_efficiency(text, device("h100-80gb"))


def asked(**given):
    nothing = {"job": None, "example": None, "recipe": None, "megatron_flags": []}
    return Namespace(**{**nothing, "set": [], "num_gpus": None, **given})


def test_exactly_one_job_description_is_asked_for():
    with pytest.raises(OptionError, match="give exactly one of"):
        read_job(asked(job="a.yaml", recipe="b"))


def test_flags_need_the_number_of_gpus():
    with pytest.raises(OptionError, match="add --num-gpus"):
        read_job(asked(megatron_flags=["--num-layers", "2"]))


def test_plan_command_needs_no_pipeline_which_the_profile_knows():
    assert estimate.plan_command(Path("a job/p.json"), 64 * GIB) == (
        "megatron-autorecompute plan --profile 'a job/p.json' --budget-gib 64.00 -o plan.json"
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100-80gb", "h100-80gb"),
        ("H100", "h100-80gb"),
        ("h100-sxm", "h100-80gb"),
        ("H100 80 GB", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA GB200", "gb200-186gb"),
    ],
)
def test_a_gpu_is_found_by_any_name_that_can_only_mean_it(name, found):
    assert device(name).name == found


@pytest.mark.parametrize(
    "name", ["", "NVIDIA", "80gb", "H100 PCIe", "NVIDIA A100-SXM4-40GB", "V100"]
)
def test_any_other_gpu_is_refused_with_those_that_are_known(name):
    with pytest.raises(OptionError, match="Known: a100-80gb, h100-80gb, h200-141gb"):
        device(name)
