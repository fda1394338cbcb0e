"""A vision tower before the decoder (LLaVAModel): one policy, in parts named as the blocks."""

import contextlib
import copy
import functools

import pytest
import torch

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.policy import FULL, LayerPolicy, RecomputePolicy
from testing.predicted import predicted_peaks
from testing.ranks import run_ranks
from tests.support import VOCAB, start_parallel, tiny_config

TOWER, DECODER = 3, 4
LENGTH = 23
"""Of text and images together: to this length LLaVAModel pads on several stages."""
MICROBATCHES = 3
TWO_STAGES = {"pipeline_model_parallel_size": 2}
BLOCKS = {"vision": TOWER, "decoder": DECODER}
POLICIES = (
    "vision:full;decoder:none",
    "vision:none;decoder:full",
    "decoder:full/2*2,selective[mlp]*1,none*1;vision:full/3",
    "vision:none*2,full*1;decoder:selective[core_attn+layernorm]*2,full/2*2",
    "vision:megatron:block/1;decoder:megatron:block/2",
)
FC2, PROJ = "layers.1.mlp.linear_fc2", "layers.3.self_attention.linear_proj"
FROZEN = {
    "nothing": ((), ()),
    "the tower": (("vision_model",), ()),
    "the decoder": (("language_model",), ()),
    "the tower but an adapter in it": (("vision_model",), (f"vision_model.decoder.{FC2}",)),
    "all but the projection and two adapters": (
        ("vision_model", "language_model"),
        (f"language_model.decoder.{FC2}", f"language_model.decoder.{PROJ}"),
    ),
    "all but two adapters": (
        ("vision_model", "vision_projection", "language_model"),
        (f"language_model.decoder.{FC2}", f"language_model.decoder.{PROJ}"),
    ),
}
"""What is frozen, and what inside it is not."""


def llava(frozen=(), adapters=(), **pipeline):
    """This stage's part of a LLaVAModel with a ViT, and its weights from a fixed seed."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    language = tiny_config(num_layers=DECODER, **pipeline)
    vision = tiny_config(num_layers=TOWER, hidden_size=32)
    vision.vision_model_type = "internvit"  # without norms that need Transformer Engine
    language.language_model_type = "gpt"
    projection = tiny_config(num_layers=1, ffn_hidden_size=32)
    spec = get_gpt_layer_local_spec()
    torch.manual_seed(1)
    is_first = parallel_state.is_pipeline_first_stage()
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=spec,
        language_vocab_size=VOCAB,
        language_max_sequence_length=LENGTH,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=copy.deepcopy(spec),
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        img_h=28,
        img_w=28,
        patch_dim=14,
        pre_process=is_first,
        post_process=parallel_state.is_pipeline_last_stage(),
        add_encoder=is_first,
    ).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(adapters) or not name.startswith(frozen))
    return model


def batch():
    from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (2, 20), generator=generator)
    ids[:, 4] = DEFAULT_IMAGE_TOKEN_INDEX
    return {
        "images": torch.randn(2, 3, 28, 28, generator=generator),
        "input_ids": ids,
        "position_ids": torch.arange(20).repeat(2, 1),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "labels": torch.randint(0, VOCAB, (2, 20), generator=generator),
        "loss_mask": torch.ones(2, 20),
        "num_image_tiles": torch.ones(2, dtype=torch.int),
    }


def one_step(model):
    """The loss and every gradient, dropout on."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model.zero_grad(set_to_none=True)
    model_parallel_cuda_manual_seed(9, force_reset_rng=True)
    losses, mask = model(**batch())
    loss = (losses.float() * mask).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def parsed(text):
    return RecomputePolicy.parse(text, num_layers=TOWER + DECODER, blocks=BLOCKS)


@contextlib.contextmanager
def watched(model):
    """How often each layer's forward runs, and the bytes that autograd saves in it the first time;
    last those of the whole tower, checkpoints around its layers included."""
    from megatron_autorecompute.compat import model_layers

    runs, kept, inside = [0] * (TOWER + DECODER), [0] * (TOWER + DECODER + 1), []
    places = [(model.vision_model.decoder, -1), *model_layers.numbered_layers([model])]

    def enter(_, __, index):
        inside.append(index)
        if index >= 0:
            runs[index] += 1

    def pack(tensor):
        if torch._C._current_graph_task_id() == -1:  # no backward
            for index in inside:
                kept[index] += tensor.nbytes
        return tensor

    def leave(*_):
        inside.pop()

    with contextlib.ExitStack() as hooks:
        for module, index in places:
            before = functools.partial(enter, index=index)
            for handle in (
                module.register_forward_pre_hook(before),
                module.register_forward_hook(leave),
            ):
                hooks.callback(handle.remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each))
        yield runs, kept


def under_policies(frozen):
    """Which bits each policy changes, how often each layer's forward ran, and what was kept."""
    from megatron_autorecompute.apply import apply, blocks

    start_parallel()
    model = llava(*FROZEN[frozen])
    assert blocks(model) == BLOCKS
    loss, gradients = one_step(model)
    assert sorted(gradients) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    found = {}
    for text in POLICIES:
        with apply(parsed(text), model), watched(model) as (runs, kept):
            again, theirs = one_step(model)
        changed = [
            n for n in gradients if n not in theirs or not torch.equal(gradients[n], theirs[n])
        ]
        found[text] = (["loss"] * (again != loss) + changed, runs, kept)
    return found


@pytest.mark.parametrize("frozen", FROZEN)
def test_a_policy_by_blocks_changes_no_bit_and_frozen_layers_run_once_and_keep_nothing(frozen):
    results = run_ranks(under_policies, 1, frozen)[0]
    assert {text: changed for text, (changed, *_) in results.items()} == {t: [] for t in POLICIES}
    runs = {text: counts for text, (_, counts, _) in results.items()}
    kept = {text: saved for text, (*_, saved) in results.items()}
    tower = {"the tower but an adapter in it": [1, 2, 2]}
    is_trained = frozen in ("nothing", "the decoder")
    a, b, c = tower.get(frozen, [2, 2, 2] if is_trained else [1, 1, 1])
    first = 1 if frozen == "all but two adapters" else 2  # its input requires no gradient
    assert runs[POLICIES[0]] == [a, b, c, 1, 1, 1, 1]
    assert runs[POLICIES[1]] == [1, 1, 1, first, 2, 2, 2]
    assert runs[POLICIES[2]] == [a, b, c, first, 2, 1, 1]
    assert runs[POLICIES[3]] == [1, 1, c, 1, 1, 2, 2]
    assert runs[POLICIES[4]] == [a, 1, 1, first, 2, 1, 1]
    # What a layer in front of all that is trained keeps is nothing, under every policy.
    for saved in kept.values():
        assert (saved[-1] == 0) == (c == 1)
        assert saved[0] == 0 or a == 2
    assert (kept[POLICIES[0]][TOWER] == 0) == (first == 1)
    assert all(kept[POLICIES[0]][TOWER + 1 : -1])  # no recompute there


def refusals():
    from megatron_autorecompute.apply import apply, blocks, in_force
    from megatron_autorecompute.integrations.megatron_bridge import policy_hook

    start_parallel()
    model, said = llava(), {}
    policy_hook({"decoder": "none", "vision": ["full"] * TOWER})([model])
    loss, _ = one_step(model)
    assert in_force(model).policy.format() == "full*3,none*4"
    in_force(model).undo()
    assert one_step(model)[0] == loss
    for text in ("audio:full;decoder:none", "vision:full/2*2,none*1;decoder:selective[moon]"):
        try:
            policy_hook(text)([model])
        except PolicyError as error:
            said[text] = str(error)
    try:
        apply(RecomputePolicy.parse("full/2*4,none*3", num_layers=7), model)
    except PolicyError as error:
        said["across"] = str(error)
    for text in ("full", "decoder:none"):
        with pytest.raises(PolicyError, match=r"several blocks: name each, as in vision:"):
            policy_hook(text)([model])
    assert blocks(model.language_model) == {"decoder": DECODER}
    return list(said.values())


def test_what_cannot_run_is_refused():
    unknown, module, across = run_ranks(refusals, 1)[0]
    assert "names audio; this model's blocks are vision (3 layers) and decoder (4" in unknown
    assert "moon" in module
    assert "cannot span two chunks" in across


# --- several stages: the tower is on the first, in front of its part of the decoder ---------------


def one_call(model, forward_backward):
    """A call of Megatron's schedule, dropout on: its losses on the last stage, and gradients."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def step(_, chunk):
        losses, mask = chunk(**data)
        return losses, lambda output: (
            (output.float() * mask).sum(),
            {"loss": output.float().sum().item()},
        )

    model.zero_grad(set_to_none=True)
    model_parallel_cuda_manual_seed(9, force_reset_rng=True)
    data = batch()
    reduced = forward_backward(
        forward_step_func=step,
        data_iterator=iter(range(MICROBATCHES)),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [each["loss"] for each in reduced], gradients


def on_two_stages(frozen):
    """Which bits the policies change, and what `attach` measured, planned and needed."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_autorecompute import attach
    from megatron_autorecompute.apply import apply, blocks
    from tests.runtime.test_t5 import t5

    start_parallel(**TWO_STAGES)
    rank, forward_backward = torch.distributed.get_rank(), get_forward_backward_func()
    with pytest.raises(PolicyError, match="A T5Model on 2 pipeline stages"):
        blocks(t5(**TWO_STAGES))
    model = llava(*FROZEN[frozen], **TWO_STAGES)
    model.model_type = ModelType.encoder_or_decoder
    assert blocks(model) == BLOCKS
    with pytest.raises(PolicyError, match="covers 6 layers, the model has 7"):
        apply(RecomputePolicy.parse("none", num_layers=6), model)
    losses, gradients = one_call(model, forward_backward)
    changed = []
    for text in POLICIES[2:4]:
        with apply(parsed(text), model):
            again, theirs = one_call(model, forward_backward)
        assert theirs.keys() == gradients.keys()
        changed += ["loss"] * (again != losses)
        changed += [name for name in gradients if not torch.equal(gradients[name], theirs[name])]
    del again, theirs, gradients

    trained = [p for p in model.parameters() if p.requires_grad]
    auto = attach(model, torch.optim.SGD(trained), budget_gib=1, say=lambda _: None)
    scheduled, lengths = auto.schedule(forward_backward), [2 * LENGTH] * MICROBATCHES
    while auto.plan is None:
        auto.tokens(lengths)
        one_call(model, scheduled)
    auto.tokens(lengths)
    one_call(model, scheduled)
    predicted_bytes = predicted_peaks(auto, lengths)[rank]
    return changed, auto.plan, auto.peak_bytes / predicted_bytes


@pytest.mark.newest_version
def test_a_tower_on_the_first_of_two_stages_is_run_measured_and_planned_there():
    (changed, plan, first), (changed_last, _, last) = run_ranks(on_two_stages, 2, "the tower")
    assert changed == changed_last == []
    parts = plan.policy.format(plan.profile.model.blocks).split(";")
    # Which choices are the fastest hangs on times.
    assert [part.split(":")[0] for part in parts] == ["vision", "decoder"]
    assert plan.layout.chunk_layers() == ((0, 1, 2, 3, 4), (5, 6))
    tower, decoder = sorted(plan.profile.kinds, key=lambda kind: kind.layers)
    assert (tower.layers, decoder.layers) == ((0, 1, 2), (3, 4, 5, 6))
    assert {record.held_bytes for record in tower.choices} == {0}  # nothing is kept of it
    assert decoder.record(LayerPolicy()).held_bytes > 4 * decoder.record(FULL).held_bytes > 0
    assert plan.profile.boundary_bytes == 2 * LENGTH * 64 * 4  # the decoder's tokens and width
    assert first == pytest.approx(1, abs=0.01)
    assert last == pytest.approx(1, abs=0.01)
