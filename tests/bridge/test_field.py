"""The field in Bridge's configs: constructor, override, YAML, finalize; with and without us."""

import subprocess
import sys

import pytest
import yaml

from megatron_autorecompute.errors import ApplyError, OptionError, PolicyError
from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.policy import RecomputePolicy
from tests.bridge import recipes

MIX = ["full", "none", "selective[core_attn]", "none"]
VALUES = ["auto", "full*2,none*2", "selective[core_attn+mlp]+offload[mlp_norm]", "@plan.json", MIX]

pytestmark = pytest.mark.usefixtures("bridge")


@pytest.fixture
def cfg(bridge):
    return recipes.tiny_llama_pretrain_config()


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_field_survives_constructor_copy_dict_and_yaml(cfg, value, tmp_path):
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.utils.config_utils import InstantiationMode

    provider = type(cfg.model)(
        num_layers=4, hidden_size=64, num_attention_heads=4, recompute_policy=value
    )
    assert provider.recompute_policy == value
    megatron_bridge.set_policy(cfg.model, value)
    cfg.to_yaml(str(tmp_path / "run_config.yaml"))
    written = yaml.safe_load((tmp_path / "run_config.yaml").read_text())
    assert written["model"]["recompute_policy"] == value
    assert cfg.to_dict()["model"]["recompute_policy"] == value
    for mode in InstantiationMode:
        again = ConfigContainer.from_yaml(str(tmp_path / "run_config.yaml"), mode=mode)
        assert again.model.recompute_policy == value
        assert type(again.model) is type(cfg.model)


@pytest.mark.parametrize("value", VALUES[:-1])
def test_an_override_needs_no_quotes_beyond_the_shells(cfg, overridden, value):
    assert overridden(cfg, f"model.recompute_policy={value}").model.recompute_policy == value


def test_a_list_and_null_are_overrides_as_hydra_has_them(cfg, overridden):
    changed = overridden(cfg, "model.recompute_policy=[full,full,none,none]")
    assert list(changed.model.recompute_policy) == ["full", "full", "none", "none"]
    assert overridden(cfg, "model.recompute_policy=null").model.recompute_policy is None


def test_finalizing_twice_changes_nothing_more(cfg):
    megatron_bridge.set_policy(cfg.model, MIX)
    cfg.model.finalize()
    once = {name: repr(value) for name, value in vars(cfg.model).items()}
    cfg.model.finalize()
    assert {name: repr(value) for name, value in vars(cfg.model).items()} == once
    assert cfg.model.recompute_granularity is None


@pytest.mark.parametrize("policy", ["full*3", "selective[attention]", "everything"])
def test_finalize_refuses_what_is_no_policy_for_this_model(cfg, policy):
    megatron_bridge.set_policy(cfg.model, policy)
    with pytest.raises(PolicyError):
        cfg.model.finalize()


def test_mla_and_heterogeneous_configs_of_bridge_have_the_field(bridge):
    from megatron.bridge.models import transformer_config

    for name in ("TransformerConfig", "MLATransformerConfig", "HeterogeneousTransformerConfig"):
        assert "recompute_policy" in getattr(transformer_config, name).__dataclass_fields__, name
    mla = transformer_config.MLATransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        multi_latent_attention=True,
        recompute_policy="selective[mla_up_proj]*4",
    )
    mla.finalize()
    mla.finalize()


# --- against the recipe's own recompute -----------------------------------------------------------


def test_a_policy_on_the_command_line_replaces_the_recipes_own_recompute(cfg, overridden):
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "uniform"
    cfg.model.recompute_num_layers = 1
    changed = overridden(cfg, "model.recompute_policy=none*4")
    assert megatron_bridge.resolve(changed) == RecomputePolicy.parse("none", num_layers=4)


def test_a_policy_beside_the_recipes_own_recompute_is_refused_with_the_translation(cfg, overridden):
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "block"
    cfg.model.recompute_num_layers = 2
    cfg.model.recompute_policy = "auto"
    with pytest.raises(PolicyError, match=r"leave one of them out.*megatron:block/2"):
        megatron_bridge.resolve(cfg)
    changed = overridden(
        cfg, "model.recompute_policy=none*4", "model.recompute_granularity=selective"
    )
    with pytest.raises(PolicyError, match="leave one of them out"):
        megatron_bridge.resolve(changed)


def test_auto_with_cuda_graphs_is_refused_before_anything_is_built(cfg):
    megatron_bridge.set_policy(cfg.model, "auto")
    cfg.model.cuda_graph_impl = "transformer_engine"
    with pytest.raises(OptionError, match="with cuda_graph_impl=transformer_engine"):
        megatron_bridge.resolve(cfg)


def test_auto_with_expert_parallel_overlap_is_refused_before_anything_is_built(cfg):
    megatron_bridge.set_policy(cfg.model, "auto")
    cfg.model.overlap_moe_expert_parallel_comm = True
    with pytest.raises(OptionError, match="or @PLAN with a plan made without"):
        megatron_bridge.resolve(cfg)


def test_a_policy_that_cuda_graphs_exclude_is_refused_in_megatrons_words(cfg):
    megatron_bridge.set_policy(cfg.model, MIX)
    cfg.model.cuda_graph_impl = "transformer_engine"
    with pytest.raises(PolicyError, match=r"refuses full on layer 0 here: .*[Ff]ull.*CUDA"):
        cfg.model.finalize()


def test_offloading_excludes_a_policy_in_megatrons_words(cfg):
    megatron_bridge.set_policy(cfg.model, MIX)
    cfg.model.cpu_offloading = True
    cfg.model.cpu_offloading_num_layers = 1
    with pytest.raises(PolicyError, match="CPU offloading"):
        cfg.model.finalize()


# --- in a process of its own: the order of imports, and life without us ---------------------------

WITHOUT_US = """
import logging, sys, traceback; logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from testing import bridge_stand_ins as stand_ins; stand_ins.install(); import megatron.bridge
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.config_utils import InstantiationMode

def load(path, mode):
    print("next")
    try:
        model = ConfigContainer.from_yaml(path, mode=mode).model
        print("loaded", model.recompute_granularity, model.recompute_num_layers)
    except Exception:  # whatever Bridge raises is what the test reads
        traceback.print_exc(file=sys.stdout)

load({native!r}, InstantiationMode.LENIENT)
load({mixed!r}, InstantiationMode.LENIENT)
load({mixed!r}, InstantiationMode.STRICT)
assert not any(name.startswith("megatron_autorecompute") for name in sys.modules)
print("next")
from megatron_autorecompute.integrations import megatron_bridge
megatron_bridge.install()
"""


@pytest.fixture(scope="module")
def without_us(bridge, tmp_path_factory):
    """What is said by each load of a config without us, and by installing after that."""
    folder = tmp_path_factory.mktemp("configs")
    paths = {}
    for name, policy in (("native", "full+all*2,none*2"), ("mixed", MIX)):
        config = recipes.tiny_llama_pretrain_config()
        megatron_bridge.set_policy(config.model, policy)
        megatron_bridge.resolve(config)
        paths[name] = str(folder / f"{name}.yaml")
        config.to_yaml(paths[name])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_US.format(**paths)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    _, native, lenient, strict, installing = done.stdout.split("next\n")
    return {
        "native": native,
        "lenient": lenient,
        "strict": strict,
        "installing": installing + done.stderr,
        "code": done.returncode,
    }


def test_installing_after_bridge_was_imported_says_what_to_move_where(without_us):
    assert without_us["code"] != 0
    assert "ApplyError: megatron.bridge was imported before" in without_us["installing"]
    assert "megatron_bridge.install()" in without_us["installing"]


def test_a_config_in_native_fields_loads_without_us(without_us):
    assert "loaded full 2" in without_us["native"]


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_loading_a_mixed_policy_without_us_says_so(without_us, mode):
    assert "recompute_policy" in without_us[mode]
    assert ("loaded" in without_us[mode]) == (mode == "lenient")


def test_set_policy_on_a_class_without_the_field_is_an_error():
    class Config:
        __dataclass_fields__ = ()

    with pytest.raises(ApplyError, match=r"above the first import of megatron\.bridge"):
        megatron_bridge.set_policy(Config(), "auto")
