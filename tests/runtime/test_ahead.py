"""Recompute that begins while a pipeline stage waits for the gradient."""

import copy
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.runtime.decisions import Decisions
from testing.ranks import run_ranks
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile
from tests.support import one_step, start_parallel, tiny_config, tiny_gpt

TEXTS = ("full+ahead", "full+all+ahead", "full/2+ahead", "full+keep[core_attn]+ahead")


def generators():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]


class Order:
    """What a rank does in a step: `F`, `B` for its chunks' forwards and backwards, `r` for a layer
    that runs again, `w` for a wait that ends."""

    def __init__(self, models):
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        self.done = ""
        self.layers = [layer for model in models for layer in model.decoder.layers]
        self.places = [
            (schedules, "forward_step", "F"),
            (schedules, "backward_step", "B"),
            (p2p_communication.P2PCommunicator, "_communicate", "w"),
        ]

    def __enter__(self):
        self.before = [getattr(owner, name) for owner, name, _ in self.places]
        for (owner, name, sign), original in zip(self.places, self.before, strict=True):
            setattr(owner, name, self.noting(original, sign))
        self.hooks = [each.register_forward_pre_hook(self.layer) for each in self.layers]
        return self

    def __exit__(self, *_):
        for (owner, name, _), original in zip(self.places, self.before, strict=True):
            setattr(owner, name, original)
        for hook in self.hooks:
            hook.remove()

    def layer(self, *_):
        self.done += "r" if torch.is_grad_enabled() else ""

    def noting(self, original, sign):
        def noted(*args, **kwargs):
            if sign != "w":
                self.done += sign
                return original(*args, **kwargs)
            found = original(*args, **kwargs)
            if kwargs.get("recv_next"):
                self.done += sign
            return found

        return noted


def of_ranks(sizes, fields, num_microbatches, texts=TEXTS):
    """By policy: same bits as without, generators included; and what the rank did, in order."""
    from megatron_autorecompute.runtime.apply import apply

    start_parallel(**sizes)
    models = tiny_gpt(tiny_config(**sizes, **fields))
    before = replaced()
    reference, states = one_step(models, num_microbatches=num_microbatches), generators()
    found = {}
    for text in texts:
        with apply(text, models), Order(models) as order:
            one_step(models, num_microbatches=num_microbatches)  # learns what is read
            order.done = ""
            result = one_step(models, num_microbatches=num_microbatches)
        equal = result.same_bits(reference) and all(map(torch.equal, generators(), states))
        found[text] = equal, order.done
    gc.collect()
    assert replaced() == before
    assert one_step(models, num_microbatches=num_microbatches).same_bits(reference)
    return found


def replaced():
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    communicator = p2p_communication.P2PCommunicator
    return [
        *(tensor_parallel.checkpoint, schedules.forward_step, schedules.backward_step),
        *(p2p_communication._p2p_ops, p2p_communication._batched_p2p_ops),
        communicator._communicate,
    ]


PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}


def test_1f1b_reruns_before_the_wait_ends_and_changes_no_bit():
    first, last = run_ranks(of_ranks, 2, PP2, {"hidden_dropout": 0.1}, 4)
    for text in TEXTS:
        assert first[text] == (True, "FF" + "rrwB" + "FrrwB" * 2 + "rrwB"), text
        assert last[text][0]
        assert last[text][1] == "FBrr" * 4, text  # under the loss nothing is waited for


@pytest.mark.parametrize(
    "fields", [{"batch_p2p_comm": True}, {"deallocate_pipeline_outputs": False}]
)
def test_other_ways_to_send_change_no_bit(fields):
    for rank in run_ranks(of_ranks, 2, PP2, fields, 3, TEXTS[:1]):
        assert rank["full+ahead"][0]


def test_four_stages_begin_early_wherever_they_wait():
    ranks = run_ranks(of_ranks, 4, PP4, {"num_layers": 8}, 6, TEXTS[:1])
    for stage, rank in enumerate(ranks):
        equal, done = rank["full+ahead"]
        assert equal
        assert done.count("rrwB") == (6 if stage < 3 else 0)


# Without overlap one call posts and waits for both directions, before a forward and a backward.
# With it each backward waits for its own gradient. What the last stage waits for comes before its
# turn, and chunk 1 there is under the loss: `Brr` reruns in its own backward.
INTERLEAVED = {
    False: (
        "FFFF" + "rrwFB" * 4 + "rrwB" * 4,
        "FFFBrrFBrr" + "rrwFB" * 2 + "FBrrFBrr" + "rrwB" * 2,
    ),
    True: (
        "FFFF" + "wFrrB" * 4 + "wrrB" + "rrwB" * 3,
        "FFFBrrFBrr" + "wFrrB" * 2 + "FBrrFBrr" + "wrrB" + "rrwB",
    ),
}


@pytest.mark.parametrize("overlap", INTERLEAVED)
def test_interleaved_begins_what_the_next_backward_needs(overlap):
    fields = {"num_layers": 8, "overlap_p2p_comm": overlap}
    ranks = run_ranks(of_ranks, 2, {**PP2, **VPP2}, fields, 4, TEXTS[:1])
    assert [rank["full+ahead"] for rank in ranks] == [(True, each) for each in INTERLEAVED[overlap]]


def test_four_interleaved_stages_change_no_bit():
    sizes = {**PP4, **VPP2}
    ranks = run_ranks(of_ranks, 4, sizes, {"num_layers": 8}, 4, TEXTS[:1], timeout_s=400)
    assert all(rank["full+ahead"][0] for rank in ranks)


def test_a_mixture_with_experts_changes_no_bit():
    sizes, fields = PP2, {"kind": "moe", "moe_shared_expert_intermediate_size": 64}
    for rank in run_ranks(of_ranks, 2, sizes, fields, 4, ("full+ahead", "full*1,full+ahead*3")):
        assert all(equal for equal, _ in rank.values())


def interrupted(sizes):
    """A step that fails in the first stage's second backward, and in the last one's third."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_autorecompute.runtime.apply import apply

    start_parallel(**sizes)
    models = tiny_gpt(tiny_config(**sizes))
    reference = one_step(models, num_microbatches=4)
    calls, left = [], 2 + torch.distributed.get_rank()
    original = schedules.custom_backward

    def custom_backward(*args):
        calls.append(1)
        if len(calls) == left:
            raise KeyboardInterrupt
        return original(*args)

    with apply("full+ahead", models), Order(models) as order:
        schedules.custom_backward = custom_backward
        with pytest.raises(KeyboardInterrupt):
            one_step(models, num_microbatches=4)
        schedules.custom_backward = original
        gc.collect()
        alive = sum(type(each).__name__ == "_Early" for each in gc.get_objects())
        order.done = ""
        again = one_step(models, num_microbatches=4)
    return alive, again.same_bits(reference), order.done


def test_an_interrupted_step_leaves_nothing_and_the_next_one_begins_early():
    first, last = run_ranks(interrupted, 2, PP2)
    assert first == (0, True, "FF" + "rrwB" + "FrrwB" * 2 + "rrwB")
    assert last[:2] == (0, True)


@pytest.mark.usefixtures("one_rank")
def test_as_long_as_a_copy_is_under_the_policy_megatrons_functions_are_replaced(monkeypatch):
    from megatron_autorecompute.runtime.apply import apply, in_force

    gc.collect()  # what other tests left
    (model,) = tiny_gpt(tiny_config())
    before = replaced()
    group = type(torch.distributed.group.WORLD)
    monkeypatch.setitem(copy._deepcopy_dispatch, group, lambda found, memo: found)
    with apply("full+ahead", model):
        copied = copy.deepcopy(model)
    gc.collect()
    assert all(one is not other for one, other in zip(replaced(), before, strict=True))
    one_step([copied])
    in_force(copied).undo()
    gc.collect()
    assert replaced() == before


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"variable_seq_lengths": True}, "exchange lengths"),
        ({"distribute_saved_activations": True}, "a part of each input"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute keeps inputs"),
    ],
)
def test_where_nothing_can_begin_early_it_is_refused(fields, says):
    from megatron_autorecompute.runtime.apply import apply

    (model,) = tiny_gpt(tiny_config())
    for name, value in fields.items():
        setattr(model.config, name, value)
    with pytest.raises(PolicyError, match=f"full\\+ahead on layer 0 cannot be used .*{says}"):
        apply("full+ahead", model)


def test_short_of_memory_at_the_least_need_nothing_begins_early_any_more():
    """A layer that begins early may fit in what the leanest choices need: it is given up first."""
    profile = uniform_profile(8, NONE, FULL, boundary_bytes=4)
    layout, schedule = Layout.from_flags(8, 4), Schedule(4, 1, 8)

    def problem(profile, budgets=1 << 40):
        return Problem(profile, layout, schedule, budgets)

    lean = tuple(choice.peak_bytes for choice in problem(profile).stages.leanest)
    plan = make_plan(replace(problem(profile, lean), allowed=("ahead",)))
    assert plan.policy.is_ahead
    decisions = SimpleNamespace(problem=problem, lean_peaks=lambda _: lean)
    down = Decisions.less(decisions, plan, [True] * 4, step=5)
    assert not down.policy.is_ahead
    assert down.notes == ("step 5: short of memory, so no recompute begins early any more",)
    assert Decisions.less(decisions, down, [True] * 4, step=6) is None
