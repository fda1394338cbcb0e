"""Config classes that were there before the field: as if it had been there before them."""

import copy
import dataclasses
import gc
import inspect
import itertools
import operator
import pickle
import re
import sys
import types

import pytest
import torch
from hypothesis import Phase, example, given, reject, settings
from hypothesis import strategies as st

from megatron_autorecompute.errors import PolicyError

pytestmark = pytest.mark.usefixtures("one_rank")

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
# Megatron's default init methods are closures, which are neither equal nor pickled.
INIT = ("init_method", "output_layer_init_method", "embedding_init_method")
GIVEN = {**SIZES, **dict.fromkeys(INIT, torch.nn.init.ones_)}


# ------------------------------------------------------------- classes of every kind, as their text

OPTIONS = [
    "",
    "repr=False",
    "eq=False",
    "order=True",
    "init=False",
    "unsafe_hash=True",
    "match_args=False",
    "kw_only=True",
    "slots=True",
    "slots=True, order=True",
]
if "weakref_slot" in inspect.signature(dataclasses.dataclass).parameters:
    OPTIONS.append("slots=True, weakref_slot=True")
FIELDS = [
    "size{n}: int = {n}",
    "names{n}: list[str] = dataclasses.field(default_factory=lambda: ['a'])",
    "only{n}: int = dataclasses.field(default={n}, kw_only=True)",
    "unseen{n}: int = dataclasses.field(default={n}, repr=False, compare=False)",
    "made{n}: int = dataclasses.field(default={n}, init=False)",
    "made_anew{n}: list[int] = dataclasses.field(init=False, default_factory=list)",
    "count{n}: ClassVar[int] = {n}",
    "_: dataclasses.KW_ONLY",
    "hidden_size: int = 128",
]
INIT_VARS = ["scale{n}: dataclasses.InitVar[int] = {n}", "scale{n}: 'dataclasses.InitVar[int]' = 3"]
METHODS = [
    "def __init__(self, heads=4, **given): {base}.__init__(self, **given); self.heads = heads",
    "def __repr__(self): return 'mine {n}'",
    "def __eq__(self, other): return 'as it likes {n}'",
    "def __hash__(self): return {n}",
    "def __lt__(self, other): return 'less {n}'",
    "@property\n    def __match_args__(self): return ('mine',)",
    "__doc__ = 'What it is for {n}.'",
]


def class_text(name, base, decorator, fields, methods, init_var):
    body = [*fields, *methods]
    if init_var:
        body += [
            init_var,
            "def __post_init__(self, *given): self.given = given; "
            "TransformerConfig.__post_init__(self)",
        ]
    n = len(name)
    lines = [f"    {line}".format(n=n, base=base) for line in body or ["pass"]]
    return "\n".join([f"@dataclasses.dataclass({decorator})", f"class {name}({base}):", *lines])


levels = st.tuples(
    st.sampled_from(OPTIONS),
    st.lists(st.sampled_from(FIELDS), unique=True, max_size=3),
    st.lists(st.sampled_from(METHODS), unique=True, max_size=2),
    st.sampled_from([None, None, *INIT_VARS]),
)
HEAD = """
import dataclasses
from typing import ClassVar
from megatron.core.transformer.transformer_config import TransformerConfig
"""


def made_from(text, name):
    """The classes that a module with this text defines."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(text, vars(module))
    return [module.Base, module.Derived]


# -------------------------------------------------------------------------------- what they show


def outcome(function, *args, **named):
    """What it returns or raises, as text."""
    try:
        found = repr(function(*args, **named))
    except Exception as error:
        found = repr(error)
    return re.sub(" at 0x[0-9a-f]+", "", found)


def behaviour(kind):
    """All that a class and its configs show, by name."""
    from megatron_autorecompute.runtime import config_field as config

    policies = {"first": "full*4", "same": "full*4", "other": "none*4"}
    shown = {
        "signature": outcome(inspect.signature, kind),
        # Made of the arguments; without an __init__ it keeps telling those there were.
        "doc": kind.__doc__ if "__init__" in vars(kind) else None,
        "match_args": outcome(lambda: kind.__match_args__),
        "options": repr(kind.__dataclass_params__),
        "no argument": outcome(kind),
        "no policy": outcome(kind, **GIVEN),
    }
    for name, field in kind.__dataclass_fields__.items():
        shown[f"field {name}"] = outcome(lambda field=field: field)
        if name != config.POLICY_FIELD:  # an attribute, where a class written with it has a slot
            shown[f"{name} of the class"] = outcome(lambda name=name: kind.__dict__[name])
    made = {}
    for name, policy in policies.items():
        shown[name] = outcome(kind, **GIVEN, recompute_policy=policy)
        if "Error(" not in shown[name]:
            made[name] = kind(**GIVEN, recompute_policy=policy)
    for (a, one), (b, another) in itertools.product(made.items(), repeat=2):
        for do in (operator.eq, operator.lt, operator.le, operator.gt, operator.ge):
            shown[f"{a} {do.__name__} {b}"] = outcome(do, one, another)
        shown[f"hash of {a} and {b}"] = outcome(lambda x, y: hash(x) == hash(y), one, another)
    for name, one in made.items():
        shown[f"{name} replaced"] = outcome(dataclasses.replace, one, recompute_policy="none")
        for twin in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            shown[f"{name} {twin.__name__}"] = outcome(twin, one)
        shown[f"{name} values"] = outcome(dataclasses.asdict, one)
        more = ("given", "heads", "recompute_policy", "made4", "made7", "count4", "names4")
        shown[f"{name} more"] = [outcome(getattr, one, at) for at in more]
    return shown


@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
@given(levels, levels)
@example(("order=True", FIELDS[:3], METHODS[1:4], None), ("", FIELDS[5:8], METHODS[:3], None))
@example(("slots=True", FIELDS[4:7], [], INIT_VARS[0]), ("", [FIELDS[8]], [], INIT_VARS[1]))
def test_a_class_takes_the_field_as_if_it_had_been_there_when_the_class_was_made(base, derived):
    from megatron_autorecompute.runtime import config_field as config

    gc.collect()  # the classes of the example before
    text = HEAD + class_text("Base", "TransformerConfig", *base)
    text += "\n" + class_text("Derived", "Base", *derived)
    try:
        before = made_from(text, "config_classes")
    except (TypeError, ValueError):
        reject()  # what Python itself refuses
    untouched = [dict(vars(kind)) for kind in before]
    config.install()
    try:
        taken = [behaviour(kind) for kind in before]
        installed = [dict(vars(kind)) for kind in before]
        config.install()
        assert [dict(vars(kind)) for kind in before] == installed
        for kind, found in zip(made_from(text, "config_classes"), taken, strict=True):
            assert found == behaviour(kind)
    finally:
        config.uninstall()
    for kind, attributes in zip(before, untouched, strict=True):
        # copyreg notes what it has found of a class that was pickled.
        assert {**vars(kind), "__slotnames__": None} == {**attributes, "__slotnames__": None}


def test_rules_are_asked_of_a_class_with_a_post_init_of_its_own_without_running_that_again():
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_autorecompute.compat import rules
    from megatron_autorecompute.policy import RecomputePolicy
    from megatron_autorecompute.runtime import config_field as config

    @dataclasses.dataclass
    class Scaled(TransformerConfig):
        scale: dataclasses.InitVar[int] = 2

        def __post_init__(self, scale):
            self.hidden_size *= scale
            self.num_layers += 1
            super().__post_init__()

    config.install()
    try:
        scaled = Scaled(**SIZES, scale=3, recompute_policy="full*5")
        assert (scaled.hidden_size, scaled.num_layers) == (192, 5)
        rules.check_allowed(scaled, RecomputePolicy.parse("full", num_layers=5))
        with pytest.raises(PolicyError, match=r"refuses .* only supported with moe_grouped_gemm"):
            Scaled(**SIZES, scale=3, recompute_policy="selective[moe_act]")
    finally:
        config.uninstall()


def test_an_install_that_fails_leaves_nothing_behind():
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_autorecompute.runtime import config_field as config

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
        config.install()
    after = dict(vars(TransformerConfig))
    del Mine
    gc.collect()  # or every later install fails
    assert after == before
