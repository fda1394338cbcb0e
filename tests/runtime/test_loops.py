"""The loops of examples/loops: the same losses as without `attach`, and a plan."""

import pytest

from examples.loops import actor_update, bare, slime_hook, train_step
from megatron_autorecompute import attach
from megatron_autorecompute.errors import OptionError
from tests.hybrid_models import runnable, small_model
from tests.runtime.test_any_loop import model_parallel_seed


@pytest.fixture(autouse=True)
def _hybrid_models_where_there_are(monkeypatch):
    for loop in (bare, actor_update, train_step):
        monkeypatch.setattr(loop, "SmallGPT", small_model)
    with runnable():
        yield


@pytest.mark.newest_version
def test_a_bare_loop(one_rank, capsys):
    model_parallel_seed()
    plain = bare.train(15, with_auto=False)
    assert bare.train(15) == plain
    assert "recompute auto: the plan" in capsys.readouterr().out


@pytest.mark.newest_version
def test_a_loop_with_log_probs_several_updates_and_sleep(one_rank):
    plain, _ = actor_update.train(8, with_auto=False)
    losses, auto = actor_update.train(8)
    assert losses == plain
    assert auto.plan is not None
    assert auto.steps == 16  # log-prob passes are not counted
    auto.close()


@pytest.mark.newest_version
def test_a_loop_that_knows_nothing_of_us_but_a_hook(one_rank, monkeypatch):
    monkeypatch.setattr(slime_hook, "MODULES", (train_step.__name__,))
    look_up = train_step.get_forward_backward_func
    plain, _ = train_step.train(8, hook=None)
    critic = small_model()  # another model of the process, whose auto is asked about every call
    of_critic = attach(critic.chunks, None, budget_gib=1, say=print)
    of_critic.watch(train_step)
    losses, gpt = train_step.train(8, slime_hook.before_train_step, bare.BUDGET_GIB)
    assert losses == plain
    auto = slime_hook.attached(gpt.chunks)
    assert auto.plan is not None
    assert (auto.steps, of_critic.steps) == (16, 0)
    auto.close()
    of_critic.close()
    assert train_step.get_forward_backward_func is look_up
    with pytest.raises(OptionError, match="has no get_forward_backward_func"):
        auto.watch(slime_hook)
