"""A model of Bridge with a vision tower of transformers: its policy covers the language model."""

import pytest
import torch

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.policy import FULL, NONE
from testing.predicted import predicted_peaks
from tests.bridge.recipes import tiny_vision_provider, tiny_vision_provider_with_features

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTH, IMAGE, VISION_START = 32, 100, 102


def built(make, *hooks):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    provider = make()
    provider.finalize()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    for hook in hooks:
        megatron_bridge.register(provider, hook)
    (chunk,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None
    )
    return chunk.train()


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 90, (1, LENGTH), generator=generator)
    ids[0, 3], ids[0, 4:8] = VISION_START, IMAGE
    return {
        "input_ids": ids,
        "position_ids": torch.arange(LENGTH).expand(3, 1, LENGTH),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "labels": ids.roll(1, 1),
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def gradients(model):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    model.zero_grad(set_to_none=True)
    model(**batch()).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def lora(chunks):
    from megatron.bridge.peft.lora import LoRA

    return LoRA(dim=4, alpha=8, target_modules=["linear_qkv", "linear_fc2"])(chunks, training=True)


MODELS = pytest.mark.parametrize(
    ("make", "adapters"),
    [(tiny_vision_provider_with_features, ()), (tiny_vision_provider, (lora,))],
    ids=["Qwen3-VL, all trained", "Qwen2.5-VL, LoRA"],
)


@MODELS
def test_policies_of_the_language_model_change_no_gradient_and_the_tower_has_none(make, adapters):
    without = gradients(built(make, *adapters))
    assert any("vis" in name for name in without) == (not adapters)
    for text in ("full*2,none*2", "decoder:full/2*2,selective[mlp]*2"):
        run = gradients(built(make, megatron_bridge.policy_hook(text), *adapters))
        assert run.keys() == without.keys()
        assert all(torch.equal(run[name], without[name]) for name in without)
    with pytest.raises(PolicyError, match=r"names vision; this model's blocks are decoder \(4 lay"):
        built(make, megatron_bridge.policy_hook("vision:full;decoder:none"))


def planned(model):
    """Train the model under auto until a plan runs, and one step under it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_autorecompute import attach

    trained = [p for p in model.parameters() if p.requires_grad]
    auto = attach(model, torch.optim.SGD(trained), budget_gib=1, say=lambda _: None)
    forward_backward, data = auto.schedule(get_forward_backward_func()), batch()

    def step(_, chunk):
        return chunk(**data), lambda losses: (losses.mean(), {})

    def call():
        auto.tokens([LENGTH, LENGTH])
        model.zero_grad(set_to_none=True)
        forward_backward(
            forward_step_func=step,
            data_iterator=iter(range(2)),
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )

    while auto.plan is None:
        call()
    call()
    return auto


@MODELS
def test_auto_counts_the_tower_before_the_first_layer(make, adapters):
    auto = planned(built(make, *adapters))
    profile = auto.plan.profile
    assert auto.policy.format() == "none*4"
    assert predicted_peaks(auto, [LENGTH] * 2)[0] == pytest.approx(auto.peak_bytes, rel=1e-3)
    (kind,) = profile.kinds
    assert kind.record(NONE).held_bytes > 4 * kind.record(FULL).held_bytes > 0
    # What is made before the first layer stays; of the tower only if it is trained.
    assert (profile.embedding.held_bytes > 100_000) == (not adapters)
