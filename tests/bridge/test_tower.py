"""Bridge's Qwen3-VL after 0.3.1, whose tower is of Megatron's layers: policies by name, and auto.

make bridge-hybrid-checks BRIDGE=PATH MEGATRON_LM=PATH
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_autorecompute.apply import blocks
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.policy import FULL, NONE
from testing.predicted import predicted_peaks
from tests.bridge.recipes import tiny_vision_provider_with_features
from tests.bridge.test_vision import LENGTH, built, gradients, planned

TOWER = "models/qwen_vl/modelling_qwen3_vl/vision_model.py"
FOLDERS = importlib.util.find_spec("megatron.bridge").submodule_search_locations
if not any(Path(folder, TOWER).is_file() for folder in FOLDERS):
    pytest.skip("this Bridge's tower is of transformers", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_rank")


class Attention(torch.nn.Module):
    """Of the tokens of one image [t, heads, size], which Transformer Engine's takes as packed."""

    def __init__(self, config, *_, **__):
        super().__init__()
        self.config = config

    def forward(self, *projected, **_):
        sizes = (-1, projected[0].shape[-1])
        heads = (each.reshape(len(each), *sizes).transpose(0, 1) for each in projected[:3])
        attended = torch.nn.functional.scaled_dot_product_attention(*heads)
        return attended.transpose(0, 1).flatten(1)


@pytest.fixture(scope="module", autouse=True)
def without_transformer_engine(one_rank):
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import attention, model
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def layer():
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = Attention
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
        return spec

    attention.TEDotProductAttention = Attention
    model.get_vit_layer_with_transformer_engine_spec = layer
    model.TENorm = WrappedTorchNorm
    model.TEColumnParallelLinear, model.TERowParallelLinear = (
        ColumnParallelLinear,
        RowParallelLinear,
    )


def test_both_blocks_by_name_change_no_gradient():
    without = gradients(built(tiny_vision_provider_with_features))
    for text in (
        "vision:selective[mlp];decoder:full",
        "vision:selective[layernorm+mlp]*1,none*1;decoder:full/2*2,none*2",
    ):
        hook = megatron_bridge.policy_hook(text)
        run = gradients(built(tiny_vision_provider_with_features, hook))
        assert run.keys() == without.keys()
        assert all(torch.equal(run[name], without[name]) for name in without)
    for text, says in (
        (
            "vision:full;decoder:none",
            "full on layer 0, whose output the model also takes as",
        ),
        ("decoder:full", "several blocks: name each, as in vision:none\\*2;decoder:none\\*4"),
    ):
        with pytest.raises(PolicyError, match=says):
            built(tiny_vision_provider_with_features, megatron_bridge.policy_hook(text))


def test_auto_measures_the_towers_layers():
    model = built(tiny_vision_provider_with_features)
    auto = planned(model)
    assert auto.policy.format(blocks(model)) == "vision:none*2;decoder:none*4"
    assert auto.peak_bytes == pytest.approx(predicted_peaks(auto, [LENGTH] * 2)[0], rel=0.01)
    tower, decoder = auto.plan.profile.kinds
    assert (tower.layers, decoder.layers) == ((0, 1), (2, 3, 4, 5))
    assert tower.record(NONE).held_bytes > 0
    assert decoder.record(NONE).held_bytes > 4 * decoder.record(FULL).held_bytes > 0
