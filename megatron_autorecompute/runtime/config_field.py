"""The config field: `TransformerConfig(recompute_policy=…)` after an explicit `install()`.

Only str, list, dict and None live in the field, as Megatron Bridge serialises nothing else. With
None everything is exactly Megatron's. With a policy, the config asks Megatron's own rules about
every choice, and the blocks built from it run the policy from their first forward on.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat import model_layers, rules, stage_layout, versions
from megatron_autorecompute.errors import ApplyError, PolicyError
from megatron_autorecompute.megatron_fields import POLICY_FIELD
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import GRAMMAR, RecomputePolicy
from megatron_autorecompute.runtime.apply import apply_at_construction

_HELP = f"What every layer recomputes: auto measures and solves; otherwise {GRAMMAR}."
_GENERATED = (
    "__init__",
    "__repr__",
    "__eq__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__match_args__",
    "__doc__",
)
"""What `@dataclass` makes from the fields, where the class has not its own."""
_LAYER_SIZES = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
)
_installed = ExitStack()
"""Puts back, last first, what `install()` has set."""


def install() -> None:
    """Add the field to TransformerConfig and every subclass, and make blocks honour it.

    Call it before importing what subclasses TransformerConfig at import time (Megatron Bridge).
    Calling it again changes nothing; `uninstall()` gives back the identical classes' contents.

    Raises:
        UnsupportedVersionError: a megatron-core whose sources are not known.
    """
    versions.installed()
    if POLICY_FIELD in {field.name for field in dataclasses.fields(TransformerConfig)}:
        return  # installed before, or in the sources by our patch
    try:
        _add_field(TransformerConfig)
        for subclass in _subclasses(TransformerConfig):
            _remake(subclass)
        _wrap(TransformerConfig, "__post_init__", checked_post_init)
        for block_type in model_layers.constructed_types():
            _wrap(block_type, "__init__", applying_init)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Undo `install()`; models and configs made meanwhile keep what they have."""
    _installed.close()


def policy_of(config: TransformerConfig) -> RecomputePolicy | None:
    """The policy in a config's field, or None when there is none or it is still `auto`.

    Raises:
        PolicyError: the field holds something else, or a policy of another length or model.
    """
    value = getattr(config, POLICY_FIELD, None)
    if value is None or value == "auto":
        return None
    refuse_plan_of_another_model(value, config)
    return RecomputePolicy.from_config(
        value,
        num_layers=stage_layout.num_policy_layers(config),
        layout=stage_layout.counted_chunks(config),
    )


def refuse_plan_of_another_model(value: Any, config: TransformerConfig) -> None:
    """Raise PolicyError where `value` is @PLAN and the plan's layers have other sizes.

    A policy file says nothing of them, nor need a plan from a profile written by hand.
    """
    if not isinstance(value, str) or not value.startswith("@"):
        return
    path = value[1:]
    try:
        plan = json.loads(Path(path).read_text())
        facts = plan["profile"]["model"]["facts"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no plan; whether it is a policy is for RecomputePolicy.load to say
    described = facts.get("transformer_config") or facts.get("job", {}).get("config") or facts
    other = [
        f"{name} {described[name]} (here {getattr(config, name)})"
        for name in _LAYER_SIZES
        if None not in (described.get(name), getattr(config, name))
        and described[name] != getattr(config, name)
    ]
    if other:
        raise PolicyError(
            f"{path} is the plan of another model, {plan['profile']['model'].get('name')}: "
            f"{', '.join(other)}. Give this model's own plan, or auto to measure and make one."
        )


def _subclasses(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _set(owner: type, name: str, value: Any) -> None:
    _installed.enter_context(patched(owner, name, value))


def _add_field(cls: type) -> None:
    # ArgumentGroupFactory takes what stands in front of None for the type, else it warns.
    kind = str | None | list[str] | dict[str, Any]
    # ArgumentGroupFactory (megatron.training since 0.17) makes the flag from this metadata.
    flag = {"arg_names": ["--recompute-policy"], "type": str, "default": None, "help": _HELP}
    added = dataclasses.field(default=None, metadata={"argparse_meta": flag})
    only = dataclasses.make_dataclass("_Only", [(POLICY_FIELD, kind, added)])
    _set(cls, "__annotations__", {**inspect.get_annotations(cls), POLICY_FIELD: kind})
    _set(cls, POLICY_FIELD, None)
    _give_fields(cls, {**_fields(cls), **_fields(only)})


def _remake(cls: type) -> None:
    """Give a dataclass the fields that its bases have by now, where `@dataclass` would put them."""
    if "__dataclass_fields__" not in cls.__dict__:
        return
    now: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        now.update(getattr(base, "__dataclass_fields__", {}))
    own = {name: field for name, field in _fields(cls).items() if field is not now.get(name)}
    _give_fields(cls, now | own)


def _fields(cls: Any) -> dict[str, Any]:
    """All fields, those for the constructor and the class alone included."""
    return cls.__dataclass_fields__


def _give_fields(cls: type, fields: dict[str, Any]) -> None:
    """What `@dataclass` has made of the fields there were, it makes of these; the rest stays.

    What a class has written itself, options said no to or somebody has wrapped is not what would
    have been made, and is left alone: so no option of the decorator has to be known here.
    """
    before, after = _made_of(_fields(cls), cls), _made_of(fields, cls)
    _set(cls, "__dataclass_fields__", fields)
    for name in _GENERATED:
        made = name in before and name in cls.__dict__
        if made and _code(cls.__dict__[name]) == _code(before[name]):
            _set(cls, name, after[name])


def _made_of(fields: dict[str, Any], cls: type) -> dict[str, Any]:
    """All that `@dataclass` can make of fields for a class of the name of `cls`."""
    inherited = {
        "__dataclass_fields__": fields,
        "__dataclass_params__": cls.__dict__["__dataclass_params__"],
    }
    if hasattr(cls, "__post_init__"):
        inherited["__post_init__"] = None
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    made = type(cls.__name__, (type("_Fields", (), inherited),), names)
    # With slots, __init__ also sets what has a default and is no argument.
    options = {"slots": "__slots__" in cls.__dict__, "order": "__lt__" in cls.__dict__}
    return dict(vars(dataclasses.dataclass(made, unsafe_hash=True, **options)))


def _code(made: Any) -> tuple[Any, Any]:
    """Equal for functions made of equal text, and for equal values; __repr__ comes wrapped."""
    inner = getattr(made, "__wrapped__", None)
    return getattr(made, "__code__", made), getattr(inner, "__code__", inner)


def _wrap(owner: type, name: str, around: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    _set(owner, name, functools.wraps(original)(around(original)))


def checked_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TransformerConfig.__post_init__` that also asks its rules about the field."""

    def __post_init__(self: TransformerConfig) -> None:  # noqa: N807
        if getattr(self, POLICY_FIELD, None) is None:
            original(self)
            return
        as_given = copy.copy(self)
        refuse_contradiction(as_given)
        original(self)
        policy = policy_of(self)
        if policy is not None:
            rules.check_allowed(as_given, policy)

    return __post_init__


def refuse_contradiction(config: TransformerConfig) -> None:
    """Raise PolicyError, with the translation, where Megatron's own recompute is set as well."""
    own = rules.own_recompute(config)
    method = config.recompute_method or config.recompute_num_layers
    if own is None and method is None:
        return
    raise PolicyError(
        f"recompute_policy={getattr(config, POLICY_FIELD)!r:.60} was given together with "
        f"Megatron's own recompute_granularity={config.recompute_granularity!r}, "
        f"recompute_method={config.recompute_method!r}, "
        f"recompute_num_layers={config.recompute_num_layers!r}: leave one of them out. "
        f"The same as a policy is {own or 'megatron:none'!r}."
    )


def applying_init(original: Callable[..., None]) -> Callable[..., None]:
    """`__init__` of a block that then runs the policy in its config."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        value = getattr(self.config, POLICY_FIELD, None)
        if value is None:
            return
        if value == "auto" and not _auto_is_claimed():
            raise ApplyError(
                "recompute_policy='auto', but nothing in this program measures and decides: start "
                "it with python -m megatron_autorecompute.pretrain or scripts/bridge_pretrain.py, "
                "or give a policy or @PLAN."
            )
        policy = policy_of(self.config)
        if policy is not None:
            apply_at_construction(policy, self, holder=f"the config field {POLICY_FIELD}")

    return __init__


_claims: list[str] = []


def claim_auto(by: str) -> None:
    """Say that `by` will resolve `auto` on the models built from now on."""
    _claims.append(by)


def release_auto(by: str) -> None:
    """Take a claim back."""
    _claims.remove(by)


def _auto_is_claimed() -> bool:
    return bool(_claims)
