"""What people do to models, in any order: each model alive computes what a plain one computes."""

import copy
import random

import pytest
import torch

from megatron_autorecompute.errors import ApplyError
from megatron_autorecompute.policy import RecomputePolicy
from tests.default_model import tiny_model
from tests.runtime.test_copies import groups_are_shared, in_force, pickled  # noqa: F401
from tests.support import microbatch, one_step, tiny_config

pytestmark = pytest.mark.usefixtures("one_rank")

MODULES = ("core_attn", "layernorm", "mlp")
ACTIONS = 16


class Models:
    """The models alive. What each has for weights is a number: of the state they are equal to."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.plain = tiny_model(tiny_config())[0]
        self.states = [copy.deepcopy(self.plain.state_dict())]
        self.expected = {}
        self.alive = [(tiny_model(tiny_config())[0], 0)]

    # ------------------------------------------------------------------------------ what is done

    def do(self):
        """One action, on one of the models; its name."""
        actions = [self.put_in_force, self.undo, self.deepcopy, self.pickle, self.load, self.train]
        action = self.random.choice([*actions, self.evaluate, self.drop])
        at = self.random.randrange(len(self.alive))
        action(at, *self.alive[at])
        del self.alive[3:]
        return action.__name__

    def policy(self):
        parts, left = [], 4
        while left:
            modules = self.random.sample(MODULES, self.random.randint(1, 3))
            selective = f"selective[{'+'.join(modules)}]"
            parts.append(self.random.choice(["none", "full", selective, "full/2*2"][: 2 + left]))
            left -= 1 + parts[-1].startswith("full/2")
        return RecomputePolicy.parse(",".join(parts), num_layers=4)

    def put_in_force(self, _, model, __):
        from megatron_autorecompute.runtime.apply import apply

        policy = self.policy()
        if in_force(model) is None:
            apply(policy, model)
        else:
            with pytest.raises(ApplyError, match="already in force"):
                apply(policy, model)
            in_force(model).switch(policy)
        assert in_force(model).policy == policy

    def undo(self, _, model, __):
        if in_force(model) is not None:
            in_force(model).undo()
        assert in_force(model) is None

    def deepcopy(self, _, model, weights):
        self.alive.insert(0, (copy.deepcopy(model), weights))

    def pickle(self, _, model, weights):
        self.alive.insert(0, (pickled(model), weights))

    def load(self, at, model, _):
        other, weights = self.random.choice(self.alive)
        assert model.state_dict().keys() == self.plain.state_dict().keys()
        model.load_state_dict(copy.deepcopy(other.state_dict()))
        self.alive[at] = model, weights

    def train(self, at, model, _):
        one_step([model], num_microbatches=1)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        self.states.append(copy.deepcopy(model.state_dict()))
        self.alive[at] = model, len(self.states) - 1

    def evaluate(self, _, model, weights):
        self.plain.load_state_dict(self.states[weights])
        with torch.no_grad():
            one, other = (each.eval()(**microbatch(3)) for each in (model, self.plain))
        assert torch.equal(one, other)
        model.eval(), self.plain.eval()
        assert one_step([model], num_microbatches=1).same_bits(
            one_step([self.plain], num_microbatches=1)
        )
        model.train(), self.plain.train()

    def drop(self, at, _, __):
        if len(self.alive) > 1:
            del self.alive[at]

    # ------------------------------------------------------------------------------ what must hold

    def check(self):
        for model, weights in self.alive:
            for other, _ in self.alive:
                other.zero_grad(set_to_none=True)
            assert one_step([model], num_microbatches=1).same_bits(self.plain_step(weights))
            assert all(
                parameter.grad is None
                for other, _ in self.alive
                for parameter in other.parameters()
                if other is not model
            )

    def plain_step(self, weights):
        if weights not in self.expected:
            self.plain.load_state_dict(self.states[weights])
            self.expected[weights] = one_step([self.plain], num_microbatches=1)
        return self.expected[weights]


@pytest.mark.any_version
@pytest.mark.parametrize("seed", range(3))
def test_after_any_actions_every_model_has_the_gradients_of_a_plain_one(seed):
    models, done = Models(seed), []
    for _ in range(ACTIONS):
        done.append(models.do())
        try:
            models.check()
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(done)}") from error
    assert len(set(done)) > 5
