"""Config classes that were there before the field take it by name, whoever made `__init__`."""

import copy
import dataclasses
import gc
import inspect
import pickle

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.runtime import config_field

pytestmark = pytest.mark.usefixtures("one_rank")

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
# Megatron's default init methods are closures, which are not pickled.
INIT = ("init_method", "output_layer_init_method", "embedding_init_method")
GIVEN = {**SIZES, **dict.fromkeys(INIT, torch.nn.init.ones_)}


@dataclasses.dataclass
class Plain(TransformerConfig):
    size: int = 1
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


@dataclasses.dataclass(kw_only=True, order=True, slots=True)
class Slotted(Plain):
    size: int = 1
    more: int = 2


@dataclasses.dataclass
class WithInitVar(TransformerConfig):
    size: dataclasses.InitVar[int] = 1

    def __post_init__(self, size):
        super().__post_init__()


@dataclasses.dataclass
class OwnInit(Plain):
    def __init__(self, size=1, **given):
        Plain.__init__(self, size=size, **given)


class Undecorated(OwnInit):
    pass


@pytest.mark.parametrize("kind", [Plain, Slotted, WithInitVar, OwnInit, Undecorated])
def test_a_class_takes_the_field_by_name_and_is_as_before_without_it(kind):
    before = dict(vars(kind))
    config_field.install()
    try:
        config = kind(**GIVEN, size=3, recompute_policy="full*4")
        assert config.recompute_policy == "full*4"
        assert kind(**GIVEN).recompute_policy is None
        assert "recompute_policy" in inspect.signature(kind).parameters
        for twin in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            assert twin(config).recompute_policy == "full*4"
        assert dataclasses.asdict(config)["recompute_policy"] == "full*4"
        if kind is Plain:
            assert dataclasses.replace(config, recompute_policy="none").recompute_policy == "none"
        with pytest.raises(PolicyError):
            kind(**GIVEN, recompute_policy="full*3")

        @dataclasses.dataclass
        class Later(kind):
            last: int = 5

        later = Later(**GIVEN, last=6, recompute_policy="none*4")
        assert (later.recompute_policy, later.last) == ("none*4", 6)
        del Later, later
    finally:
        config_field.uninstall()
        gc.collect()  # classes of this test
    # copyreg notes what it has found of a class that was pickled.
    assert {**vars(kind), "__slotnames__": None} == {**before, "__slotnames__": None}
    with pytest.raises(TypeError, match="recompute_policy"):
        kind(**GIVEN, recompute_policy="full*4")


def test_rules_are_asked_of_a_class_with_a_post_init_of_its_own_without_running_that_again():

    from megatron_autorecompute.compat import rules
    from megatron_autorecompute.policy import RecomputePolicy

    @dataclasses.dataclass
    class Scaled(TransformerConfig):
        scale: dataclasses.InitVar[int] = 2

        def __post_init__(self, scale):
            self.hidden_size *= scale
            self.num_layers += 1
            super().__post_init__()

    config_field.install()
    try:
        scaled = Scaled(**SIZES, scale=3, recompute_policy="full*5")
        assert (scaled.hidden_size, scaled.num_layers) == (192, 5)
        rules.check_allowed(scaled, RecomputePolicy.parse("full", num_layers=5))
        with pytest.raises(PolicyError, match=r"refuses .* only supported with moe_grouped_gemm"):
            Scaled(**SIZES, scale=3, recompute_policy="selective[moe_act]")
    finally:
        config_field.uninstall()


def test_an_install_that_fails_leaves_nothing_behind():

    class Sealed(type(TransformerConfig)):
        def __setattr__(cls, name, value):
            if "sealed" in cls.__dict__:
                raise RuntimeError("sealed")
            super().__setattr__(name, value)

    @dataclasses.dataclass
    class Mine(TransformerConfig, metaclass=Sealed):
        size: int = 1

    Mine.sealed = True
    before = dict(vars(TransformerConfig))
    with pytest.raises(RuntimeError, match="sealed"):
        config_field.install()
    after = dict(vars(TransformerConfig))
    del Mine
    gc.collect()  # or every later install fails
    assert after == before
