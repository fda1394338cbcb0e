"""`profile --no-device --recipe`: Bridge's own recipes, whole, with the real dimensions."""

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.no_device.recipe import job_from_recipe
from megatron_autorecompute.profile import Profile
from tests.bridge.test_recipes import hf_config


@pytest.fixture
def hub(bridge, monkeypatch):
    """The published dimensions, which Bridge reads from the hub."""
    from megatron.bridge import AutoBridge

    monkeypatch.setattr(
        AutoBridge,
        "from_hf_pretrained",
        classmethod(lambda cls, path, **_: cls.from_hf_config(hf_config(path))),
    )


def test_a_recipe_is_profiled_and_its_plan_is_printed_as_lines_for_it(hub, tmp_path, capsys):
    path = tmp_path / "profile.json"
    words = ["profile", "--no-device", "--gpu", "h100-80gb", "-o", str(path)]
    assert main([*words, "--recipe", "llama3_8b_pretrain_config", "--num-gpus", "8"]) == 0
    found = Profile.load(path)
    assert (found.num_layers, found.parallelism.seq_length) == (32, 8192)
    assert found.parallelism.context_parallel == 2
    # 8.03e9 parameters in 16 bit on every rank: the public model's size.
    assert found.stages[0].static.parameter_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    planning = capsys.readouterr().out.splitlines()[-1].split()[1:]
    assert main(planning) == 0
    assert "cfg.model.recompute_" in capsys.readouterr().out.splitlines()[-1]


def test_a_recipe_names_no_world_so_the_smallest_is_taken(hub):
    asked = job_from_recipe("llama3_70b_pretrain_config")
    config = asked.config
    assert asked.num_gpus == (
        config["tensor_model_parallel_size"]
        * config["pipeline_model_parallel_size"]
        * config["context_parallel_size"]
    )
    assert asked.accumulate_allreduce_grads_in_fp32  # bf16_mixed


def test_an_unknown_recipe_is_named(bridge):
    with pytest.raises(OptionError, match="no recipe function 'llama9_config'"):
        job_from_recipe("llama9_config")
