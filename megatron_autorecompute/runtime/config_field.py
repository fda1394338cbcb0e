"""The config field: `TransformerConfig(recompute_policy=…)` after an explicit `install()`.

The field holds str, list, dict or None, because Megatron Bridge serialises nothing else. With None
everything is exactly as in Megatron. With a policy, the config checks every choice against
Megatron's own rules, and the blocks built from it run the policy from their first forward on.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.block_names import (
    MEGATRON,
    as_megatrons,
    named_file,
    parts_of_field,
    policy_in,
    read_file,
)
from megatron_autorecompute.compat import model_layers, rules, stage_layout, versions
from megatron_autorecompute.errors import ApplyError, PolicyError
from megatron_autorecompute.megatron_fields import POLICY_FIELD
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import GRAMMAR, RecomputePolicy
from megatron_autorecompute.runtime.apply import HOLDER_KEY, apply_at_construction, blocks

_HELP = f"What every layer recomputes: auto measures and solves; otherwise {GRAMMAR}."
_LAYER_SIZES = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
)
NAME_EACH = (
    "Of a model with a vision tower or an encoder name each block, as in "
    "vision:full*24;decoder:none*32."
)
"""What to do if a policy without names does not fit: a tower's config copies the decoder's."""
_installed = ExitStack()
"""Restores what `install()` has set, in reverse order."""


def install() -> None:
    """Add the field to TransformerConfig and every subclass, and make blocks honour it. What repr()
    and == of a class say that was made before does not contain it.

    Call it before importing packages that subclass TransformerConfig at import (Megatron Bridge).
    A second call changes nothing; `uninstall()` restores the classes exactly.

    Raises UnsupportedVersionError: this version of megatron-core is not supported.
    """
    versions.installed()
    if has_field():  # already installed, or in the sources by our patch
        return
    try:
        _add_field()
        _wrap(TransformerConfig, "__post_init__", checked_post_init)
        for block_type in model_layers.constructed_types():
            _wrap(block_type, "__init__", applying_init)
        for model_type in model_layers.pattern_types():
            _wrap(model_type, "__init__", noting_pattern)
    except BaseException:
        uninstall()
        raise


def has_field() -> bool:
    """Whether TransformerConfig has the field."""
    return POLICY_FIELD in TransformerConfig.__dataclass_fields__


def uninstall() -> None:
    """Undo `install()`; models and configs made in the meantime keep their field and policy."""
    _installed.close()


def policy_of(config: TransformerConfig) -> RecomputePolicy | None:
    """The policy in a config's field, or None: there is none, it is still `auto`, or it names
    several blocks, which only the built model has.

    Raises PolicyError: the value is not a policy, or is one of another length or model.
    """
    value = without_file(getattr(config, POLICY_FIELD, None), config)
    if value is None or value == "auto" or names_several_blocks(value):
        return None
    return stage_layout.read_policy(value, config)


def names_several_blocks(value: Any) -> bool:
    """Whether a field's value has parts for several blocks of a model, by name."""
    parts = parts_of_field(value)
    return parts is not None and len(parts) > 1


def refuse_without_names(value: Any, model: Sequence[torch.nn.Module]) -> None:
    """Raise PolicyError if a policy does not name the blocks of a built model that has several:
    each took it for its own, or not. On several pipeline stages all ranks ask together."""
    found = blocks(model)
    if len(found) > 1 and not names_several_blocks(value):
        example = ";".join(f"{name}:none*{count}" for name, count in found.items())
        raise PolicyError(
            f"recompute_policy={value!r:.80}, but this "
            f"{type(model_layers.unwrapped(model[0])).__name__} has several blocks: name each, as "
            f"in {example}."
        )


def without_file(value: Any, config: TransformerConfig) -> Any:
    """A field's value with what the file says in place of @FILE; a config does so when it is made,
    so that blocks and ranks need no file.

    Raises PolicyError: the file cannot be read, or is the plan of layers of other sizes.
    """
    path = named_file(value)
    if path is None:
        return value
    content = read_file(path)
    _refuse_plan_of_another_model(path, content, config)
    said = policy_in(content)
    return as_megatrons(said) if value.startswith(MEGATRON) else said


def _refuse_plan_of_another_model(path: str, plan: Any, config: TransformerConfig) -> None:
    """Policy files have no sizes, and plans from profiles written by hand may have none."""
    try:
        facts = plan["profile"]["model"]["facts"]
    except (KeyError, TypeError):
        return  # not a plan; RecomputePolicy.load checks whether it is a policy
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


def _add_field() -> None:
    # ArgumentGroupFactory takes the type before None; in another order it warns.
    kind = str | None | list[str] | dict[str, Any]
    # ArgumentGroupFactory (megatron.training since 0.17) makes the flag from this metadata.
    flag = {"arg_names": ["--recompute-policy"], "type": str, "default": None, "help": _HELP}
    added = dataclasses.field(default=None, kw_only=True, metadata={"argparse_meta": flag})
    only: Any = dataclasses.make_dataclass("_Only", [(POLICY_FIELD, kind, added)])
    own = inspect.get_annotations(TransformerConfig)
    _set(TransformerConfig, "__annotations__", {**own, POLICY_FIELD: kind})
    _set(TransformerConfig, POLICY_FIELD, None)
    for cls in (TransformerConfig, *_subclasses(TransformerConfig)):
        if "__dataclass_fields__" in vars(cls):
            fields = {**cls.__dataclass_fields__, **only.__dataclass_fields__}
            _set(cls, "__dataclass_fields__", fields)
        if "__init__" in vars(cls):
            _wrap(cls, "__init__", taking_policy)


def taking_policy(original: Callable[..., None]) -> Callable[..., None]:
    """`__init__` of a config class that was made without the field, and takes it by name."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # An __init__ around this one may have taken it.
        setattr(self, POLICY_FIELD, kwargs.pop(POLICY_FIELD, getattr(self, POLICY_FIELD)))
        original(self, *args, **kwargs)

    signature = inspect.signature(original)
    named = inspect.Parameter(POLICY_FIELD, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), named], key=lambda each: each.kind)
    made: Any = __init__
    made.__signature__ = signature.replace(parameters=parameters)
    return __init__


def _wrap(owner: type, name: str, around: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    _set(owner, name, functools.wraps(original)(around(original)))


def checked_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TransformerConfig.__post_init__` that also checks the field against Megatron's rules."""

    def __post_init__(self: TransformerConfig) -> None:  # noqa: N807
        if getattr(self, POLICY_FIELD, None) is None:
            original(self)
            return
        as_given = copy.copy(self)
        refuse_contradiction(as_given)
        original(self)
        setattr(self, POLICY_FIELD, without_file(getattr(self, POLICY_FIELD), self))
        policy = policy_of(self)
        if policy is not None:
            rules.check_allowed(as_given, policy)

    return __post_init__


def refuse_contradiction(config: TransformerConfig) -> None:
    """Raise PolicyError, with a translation, if Megatron's own recompute is set as well."""
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
        value = without_file(getattr(self.config, POLICY_FIELD, None), self.config)
        if value is None or model_layers.is_inside_depth(self):
            return
        if value == "auto" and not _claims:
            raise ApplyError(
                "recompute_policy='auto', but nothing in this program measures and decides: start "
                "it with python -m megatron_autorecompute.pretrain (Megatron Bridge: "
                "megatron_autorecompute.bridge_pretrain), or give a policy or @PLAN."
            )
        if names_several_blocks(value):
            self.register_forward_pre_hook(_refuse_without_policy)
            return
        try:
            policy = policy_of(self.config)
        except PolicyError as error:  # the config was allowed, and then changed
            raise PolicyError(f"{error} {NAME_EACH}") from error
        if policy is not None:
            apply_at_construction(policy, self, holder=f"the config field {POLICY_FIELD}")

    return __init__


def _refuse_without_policy(block: Any, _: Any) -> None:
    """Refuse, before its forward, a block whose config names several: which one is unknown."""
    if HOLDER_KEY not in vars(block) and block.training and torch.is_grad_enabled():
        raise ApplyError(
            f"recompute_policy={getattr(block.config, POLICY_FIELD)!r:.80} names several blocks, "
            "and nothing has put it in force on the built model. Our launchers do; elsewhere call "
            "apply(policy, model)."
        )


def noting_pattern(original: Callable[..., None]) -> Callable[..., None]:
    """`__init__` of a HybridModel whose config says the pattern before any block is built."""
    names = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = names.bind(self, *args, **kwargs).arguments
        text = given.get("hybrid_layer_pattern") or given.get("hybrid_override_pattern")
        stage_layout.note_pattern(given["config"], text)
        if getattr(given["config"], POLICY_FIELD, None) is not None:
            stage_layout.pattern_of(given["config"])  # errors by position, which Megatron's lack
        original(self, *args, **kwargs)

    return __init__


_claims: list[str] = []


def claim_auto(by: str) -> None:
    """Say that `by` will resolve `auto` on the models built from now on."""
    _claims.append(by)


def release_auto(by: str) -> None:
    """Withdraw the claim that a config's `auto` is run here."""
    _claims.remove(by)
