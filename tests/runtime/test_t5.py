"""T5: one policy for encoder and decoder, whose layers follow the encoder's."""

import copy
import functools

import pytest
import torch

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import RecomputePolicy
from testing.ranks import run_ranks
from tests.planner.asked import every_manual_setting
from tests.support import VOCAB, start_parallel, tiny_config

ENCODER, DECODER = 3, 4
LONG, SHORT = 32, 16
POLICIES = (
    "full",
    "full/3*3,none*2,full*2",
    "full*1,none*2,full*2,none*1,full*1",
    "none*1,full/2*2,selective[core_attn]*2,full*1,selective[mlp]*1",
    "selective[core_attn+mlp]*4,full*3",
    "megatron:block/2",
)


def t5(**fields):
    """A T5Model, and its weights from a fixed seed."""
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    config = tiny_config(num_layers=DECODER, **fields)
    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = ENCODER
    torch.manual_seed(1)
    return T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(ENCODER),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(DECODER),
        vocab_size=VOCAB,
        max_sequence_length=LONG,
        share_embeddings_and_output_weights=True,
    ).train()


def batch():
    generator = torch.Generator().manual_seed(3)

    def tokens(length):
        return torch.randint(0, VOCAB, (2, length), generator=generator)

    return {
        "encoder_input_ids": tokens(LONG),
        "decoder_input_ids": tokens(SHORT),
        "encoder_attn_mask": torch.zeros(1, 1, LONG, LONG, dtype=torch.bool),
        "decoder_attn_mask": torch.ones(1, 1, SHORT, SHORT, dtype=torch.bool).triu(1),
        "encoder_decoder_attn_mask": torch.zeros(1, 1, SHORT, LONG, dtype=torch.bool),
        "lm_labels": tokens(SHORT),
    }


def one_step(model):
    """The loss and every gradient, dropout on."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model.zero_grad(set_to_none=True)
    model_parallel_cuda_manual_seed(9, force_reset_rng=True)
    loss = model(**batch()).float().mean()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def parsed(text, model):
    from megatron_autorecompute.compat import stage_layout

    return RecomputePolicy.parse(
        text,
        num_layers=stage_layout.num_policy_layers(model.config, ENCODER),
        layout=stage_layout.counted_chunks(model.config, ENCODER),
    )


def _count(runs, index, *_):
    runs[index] += 1


def under_policies():
    """Which bits each policy changes; how often each layer's forward ran under it."""
    from megatron_autorecompute.compat import model_layers
    from megatron_autorecompute.runtime.apply import apply

    start_parallel()
    model = t5()
    loss, gradients = one_step(model)
    found = {}
    for text in POLICIES:
        runs = [0] * (ENCODER + DECODER)
        handles = [
            layer.register_forward_pre_hook(functools.partial(_count, runs, index))
            for layer, index in model_layers.numbered_layers([model])
        ]
        with apply(parsed(text, model), model):
            again, theirs = one_step(model)
        for handle in handles:
            handle.remove()
        changed = [name for name in gradients if not torch.equal(gradients[name], theirs[name])]
        found[text] = (["loss"] * (again != loss) + changed, runs)
    return found


@pytest.fixture(scope="module")
def results():
    return run_ranks(under_policies, 1)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mixed_policy_changes_no_bit_of_a_t5(results, policy):
    assert results[policy][0] == []


def test_encoder_layers_come_first_and_the_decoders_follow(results):
    # Two runs of a layer's forward: it was recomputed.
    assert results[POLICIES[1]][1] == [2, 2, 2, 1, 1, 2, 2]
    assert results[POLICIES[2]][1] == [2, 1, 1, 2, 2, 1, 2]
    assert results["megatron:block/2"][1] == [2, 2, 1, 2, 2, 1, 1]


def refusals():
    from megatron_autorecompute.runtime.apply import apply

    start_parallel()
    model, said = t5(), {}
    for text in ("full*4", "full/2*2,none*5", "none*3,full/2*4", "none*2,full/2*2,none*3"):
        try:
            policy = RecomputePolicy.parse(text, num_layers=int(text == "full*4") or 7)
            apply(policy, model).undo()
        except PolicyError as error:
            said[text] = str(error)
    # A single block has a policy of its own, numbered from 0.
    apply(RecomputePolicy.parse("full", num_layers=DECODER), model.decoder).undo()
    return said


def test_what_a_t5_cannot_run_is_refused_with_the_reason():
    said = run_ranks(refusals, 1)[0]
    assert said.keys() == {"full*4", "none*3,full/2*4", "none*2,full/2*2,none*3"}
    assert "attends to an encoder" in said["none*3,full/2*4"]
    assert "cannot span" in said["none*2,full/2*2,none*3"]


def measured():
    """A profile measured on a T5; the peaks of policies, as predicted from it and as they were."""
    from megatron_autorecompute.planner.cost.policy_cost import evaluate
    from megatron_autorecompute.profile import Model, Parallelism, StaticBytes
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.live_bytes import LiveBytes
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    start_parallel()
    model = t5()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    static = [tensor for p in model.parameters() for tensor in (p, p.grad)]

    def step():
        model(**batch()).float().mean().backward()

    step()  # allocates what stays
    peaks = {}
    with apply(parsed("full", model), model) as applied:
        measurement = Measurement(ModelShard([model]), applied)
        for _ in measurement.policies():
            with LiveBytes(static) as memory, measurement.watch(memory):
                step()
        profile = measurement.profile(
            Model("T5", ENCODER + DECODER, 0, ENCODER), Parallelism(2, LONG), StaticBytes()
        )
        for text in POLICIES:
            applied.switch(parsed(text, model))
            with LiveBytes(static) as memory:
                memory.reset_peak()
                step()
                peak_bytes = memory.peak_bytes
            cost = evaluate(
                profile, Layout.from_flags(ENCODER + DECODER, 1), Schedule(1, 1, 1), applied.policy
            )
            peaks[text] = (cost.stages[0].peak.bytes, peak_bytes)
    return profile, peaks


@pytest.fixture(scope="module")
def profiled():
    return run_ranks(measured, 1)[0]


def test_encoder_and_decoder_layers_are_measured_apart_and_predict_the_peaks_of_policies(profiled):
    profile, peaks = profiled
    assert {kind.name: kind.layers for kind in profile.kinds} == {
        "dense": (0, 1, 2),
        "decoder": (3, 4, 5, 6),
    }
    for text, (predicted, measured_bytes) in peaks.items():
        # Encoder and decoder share embeddings, whose first gradient waits for the second: a part of
        # a model this small, which no place of the profile has, and which auto adds as it climbs.
        assert predicted == pytest.approx(measured_bytes, rel=0.1), text


def test_no_checkpoint_goes_around_decoder_layers_and_megatrons_settings_count_afresh(profiled):
    profile, _ = profiled
    problem = Problem(profile, Layout.from_flags(ENCODER + DECODER, 1), Schedule(1, 1, 1))
    least = problem.cost(RecomputePolicy.parse("full", num_layers=7)).stages[0].peak.bytes
    groups = [choice.group for choice in solve(problem.at(least)).policy.layers]
    assert groups[ENCODER:] == [1] * DECODER
    (block,) = (s for s in every_manual_setting(problem.at(least)) if s.name == "megatron:block/2")
    assert block.policy.format() == "full+all*2,none*1,full+all*2,none*2"
