"""Runs a policy: Megatron's own checkpointed forward, for one run of equal layers at a time.

Megatron's forward is not rewritten here. A block whose policy has full layers takes Megatron's
full-recompute branch. There, each run of layers is passed to Megatron's own function with a copy of
the block, which has only these layers and the method to use on them. Selective modules are set
through the attributes that Megatron itself reads (see `compat`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.block_names import Blocks
from megatron_autorecompute.compat import (
    defects,
    layer_modules,
    layer_parts,
    model_layers,
    offload_modules,
    parallel,
    rules,
    seam,
    stage_layout,
)
from megatron_autorecompute.compat.offload_modules import HostMemory
from megatron_autorecompute.compat.untyped import Block, Layer
from megatron_autorecompute.errors import ApplyError, AutorecomputeError, PolicyError
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy, Run, check_length
from megatron_autorecompute.runtime import layer_checkpoints
from megatron_autorecompute.runtime.norm_again import NormAgain
from megatron_autorecompute.runtime.run_once import EarlyBegin, Part, Scope, begin_early

logger = logging.getLogger(__name__)

Given = RecomputePolicy | str | Sequence[str] | Mapping[str, Any]
"""A policy, or what a config field takes: `RecomputePolicy.from_config`."""
HOLDER_KEY = "_autorecompute_holder"
"""Attribute in which a block, or a multi-token-prediction depth, keeps its policy in force."""


def _copied(original: Any, **other: Any) -> Any:
    """A shallow copy of a block or a config, with other values of some attributes."""
    copied: Any = object.__new__(type(original))  # a fraction of the calls of copy.copy
    vars(copied).update(vars(original), **other)
    return copied


class AppliedPolicy:
    """A policy in force on a model, until `undo()` or the end of the `with` block.

    Copies of the model (copy.deepcopy, pickle) have their own policy: the one in force when they
    were made. This object does not affect them; `in_force(copy)` returns theirs.
    """

    def __init__(self, sites: _Sites) -> None:
        self._sites = sites
        self._held: list[tuple[Any, _Held]] = [
            (owner, owner.__dict__[HOLDER_KEY]) for owner in sites.owners
        ]

    @property
    def policy(self) -> RecomputePolicy:
        """The policy in force; after `undo`, the last one."""
        return self._held[0][1].policy

    def switch(self, policy: Given) -> None:
        """Run `policy` from the next step on; call it between steps, on all ranks of a stage. If it
        offloads, that step is Megatron's warm-up, in which all groups leave.

        policy: as `apply` takes it.

        Raises:
            PolicyError: the model cannot run it; the policy in force stays.
            ApplyError: already undone, or the ranks of this stage were given different policies;
                the policy in force stays.
        """
        if not all(owner.__dict__.get(HOLDER_KEY) is held for owner, held in self._held):
            raise ApplyError("This policy was undone; apply the new one with apply(policy, model).")
        agreed = agree_on(functools.partial(self._sites.checked, policy), self._sites.groups)
        before = self.policy
        try:
            self._set(agreed)
        except BaseException:
            self._set(before)
            raise

    def _set(self, policy: RecomputePolicy) -> None:
        for owner, held in self._held:
            held.clear(owner)
            held.set(owner, policy)

    def host_memory(self) -> HostMemory:
        """Host memory that the policy's offload uses on this rank."""
        return offload_modules.host_memory()

    def undo(self) -> None:
        """Restore the model exactly as it was; a second call does nothing."""
        for owner, held in self._held:
            if owner.__dict__.get(HOLDER_KEY) is held:
                held.clear(owner)
                del owner.__dict__[HOLDER_KEY]

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def apply(
    policy: Given,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    holder: str = "megatron_autorecompute.apply",
    groups: Sequence[Any] | None = None,
) -> AppliedPolicy:
    """Make a built model recompute as `policy` says, from its next forward on.

    Args:
        policy: one choice for every layer of the whole model, on every rank; a `RecomputePolicy`,
            or what a config field takes: text, such as "full*4,none*8", a list or a dict.
        model: this rank's model chunks, wrapped (DDP, Float16Module) or bare, or a single block.
        holder: name of the caller, for the error that a second `apply` raises.
        groups: process groups whose ranks must be given the same policy, now and at every switch;
            by default the group of all ranks of this stage.

    Returns:
        The policy in force, to switch or undo.

    Raises:
        PolicyError: unreadable text, wrong length, a group across chunks, an unknown module, or a
            choice that Megatron refuses for this model, with its reason.
        PipelineError: a HybridModel's pattern does not match its config.
        ApplyError: a policy is already in force here, or ranks of this stage disagree.
    """
    sites = _Sites(model, groups)
    agreed = agree_on(functools.partial(sites.checked, policy, new=True), groups)
    return sites.hold(agreed, holder)


def blocks(model: torch.nn.Module | Sequence[torch.nn.Module]) -> dict[str, int]:
    """The blocks of a model by the names that a policy may use, with their layers, in the policy's
    order: `{"vision": 24, "decoder": 32}`. On several pipeline stages all ranks ask together.

    Raises:
        PolicyError: the model has no block, or blocks that cannot be told apart.
    """
    return dict(_Sites(model).named)


def apply_at_construction(policy: RecomputePolicy, module: torch.nn.Module, holder: str) -> None:
    """`apply` for a block just built; ranks compare policies later, before they first train it.

    A constructor must not wait for other ranks, because not every rank builds the same blocks.
    """
    apply(policy, module, holder=holder, groups=())
    held = module.__dict__[HOLDER_KEY]
    held.compared = module.register_forward_pre_hook(_compare_before_training)
    held.hooks.append(held.compared)


def in_force(model: torch.nn.Module | Sequence[torch.nn.Module]) -> AppliedPolicy | None:
    """The policy in force on a model, whoever applied it, or None.

    For models that already have one: a deep copy, an unpickled model, a model built from a config
    with the field. It is what `apply` would have returned. On several pipeline stages all ranks ask
    together.

    Raises:
        ApplyError: the model's blocks have different policies, or only some have one.
    """
    sites = _Sites(model)
    held = [owner.__dict__.get(HOLDER_KEY) for owner in sites.owners]
    if not any(held):
        return None
    if any(
        one is None or one.policy != held[0].policy or one.indices != indices
        for one, indices in zip(held, sites.indices, strict=True)
    ):
        raise ApplyError(
            "The blocks of this model are not under one policy: ask for that of a single block, as "
            "in in_force(model.decoder)."
        )
    return AppliedPolicy(sites)


class _Sites:
    """The blocks and multi-token-prediction depths of a model to which a policy applies."""

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        groups: Sequence[Any] | None = None,
    ) -> None:
        self.groups = groups
        chunks = _chunks(model)
        self.blocks = model_layers.block_sites(chunks)
        self.feature_layers = model_layers.feature_layers(chunks)
        self.mtps = model_layers.mtp_sites(chunks)
        self.first_block, self.encoder_layers = model_layers.first_block(chunks)
        patterns = [stage_layout.pattern_of(model_layers.unwrapped(chunk)) for chunk in chunks]
        self.pattern = next(filter(None, patterns), None)
        self.owners = [s.block for s in self.blocks] + [s.mtp for s in self.mtps]
        self.indices = [s.layers for s in self.blocks] + [s.indices for s in self.mtps]
        if not self.owners:
            raise PolicyError(
                "No TransformerBlock in this model: there is nothing to recompute. Leave the "
                "policy out."
            )
        held = [owner.__dict__.get(HOLDER_KEY, owner) for owner in self.owners]
        self.configs = list({id(each.config): each.config for each in held}.values())

    @property
    def num_layers(self) -> int:
        """The number of layers that a policy covers."""
        return stage_layout.num_policy_layers(self.configs[-1], self.encoder_layers)

    @property
    def named(self) -> Blocks:
        """The model's blocks with their layers, in a policy's order."""
        return stage_layout.named_blocks(self.num_layers, self.first_block, self.encoder_layers)

    def checked(self, given: Given, new: bool = False) -> RecomputePolicy:
        """The policy that was given; raises as `check` does, or PolicyError if it is none."""
        policy = given
        if not isinstance(policy, RecomputePolicy):
            in_front = self.first_block, self.encoder_layers
            policy = stage_layout.read_policy(policy, self.configs[-1], *in_front, self.pattern)
        self.check(policy, new)
        return policy

    def _layers_of(self, config: Any, policy: RecomputePolicy) -> Iterator[tuple[int, LayerPolicy]]:
        """The layers that are built from a config, with their indices: a tower has its own."""
        cut = self.encoder_layers
        has_first = any(index < cut for indices in self.indices for index in indices)
        one = not cut or (len(self.configs) == 1 and has_first)
        first = has_first and config is self.configs[0]
        for index, choice in enumerate(policy.layers):
            if one or first == (index < cut):
                yield index, choice

    def check(self, policy: RecomputePolicy, new: bool = False) -> None:
        """Raise PolicyError or ApplyError if `policy` cannot run here."""
        for owner in self.owners:
            if new and HOLDER_KEY in owner.__dict__:
                raise ApplyError(
                    "A policy is already in force on this model, applied by "
                    f"{owner.__dict__[HOLDER_KEY].holder}: undo() it or switch() to the new one. "
                    "Where the model came with it, as a copy does, in_force(model) gives it."
                )
        check_length(len(policy.layers), self.num_layers, "The policy")
        layer_checkpoints.check_beside_offload(policy)
        for config in self.configs:
            if rules.own_recompute(config) is not None:
                of = self.first_block if config is not self.configs[-1] else ""
                raise PolicyError(
                    f"The {f'block {of}' if of else 'model'} was built with Megatron's own "
                    "recompute settings as well as a policy: leave them out. As a policy they are "
                    f"{rules.own_recompute(config)!r}."
                )
            rules.check_layers(config, self._layers_of(config, policy))
        rules.check_compiler(policy)
        offload_modules.check_can_run(policy)
        self._check_features(policy)
        self._check_parts(policy)
        for site in self.blocks:
            _check_groups(site, policy.chunk_runs(site.layers))
        for mtp in self.mtps:
            for index in mtp.indices:
                _check_depth(policy.layers[index], index, mtp)
        depths = {index for mtp in self.mtps for index in mtp.indices}
        for index in (index for indices in self.indices for index in indices):
            if policy.layers[index].inner and index not in depths:
                raise PolicyError(
                    f"{policy.layers[index]} on layer {index}, which is no multi-token-prediction "
                    "depth: it has no layers inside; write full or none."
                )

    def _check_features(self, policy: RecomputePolicy) -> None:
        for index in sorted(self.feature_layers):
            if policy.layers[index].granularity == "full":
                raise PolicyError(
                    f"{policy.layers[index]} on layer {index}, whose output the model also takes "
                    "as a feature (deepstack_visual_indexes): its checkpoint gives features no "
                    "gradient. Write none or selective there."
                )

    def _check_parts(self, policy: RecomputePolicy) -> None:
        """Refuse what a layer cannot keep or recompute by itself; say what does nothing."""
        idle: dict[str, list[int]] = defaultdict(list)
        pairs = [(site.block.layers, site.layers) for site in self.blocks]
        pairs += [([site.layer] * len(site.indices), site.indices) for site in self.mtps]
        for layers, indices in pairs:
            for layer, index in zip(layers, indices, strict=True):
                choice = policy.layers[index]
                for name in layer_checkpoints.idle_in(layer, choice, index):
                    idle[f"{name} of {choice}"].append(index)
        for name, found in idle.items():
            logger.warning(
                "recompute policy: %s does nothing on %d layers, from layer %d on, which have no "
                "such part",
                name,
                len(found),
                found[0],
            )

    def hold(self, policy: RecomputePolicy, holder: str) -> AppliedPolicy:
        """Put the policy in force, on all of them or, with an error, on none."""
        try:
            for site in self.blocks:
                layers = tuple(site.block.layers)
                held = _HeldBlock(site.block, layers, site.layers, holder)
                site.block.__dict__[HOLDER_KEY] = held
            for mtp in self.mtps:
                held_of = _HeldDepths if len(mtp.indices) > 1 else _Held
                layers = (mtp.layer,) * len(mtp.indices)
                mtp.mtp.__dict__[HOLDER_KEY] = held_of(mtp.mtp, layers, mtp.indices, holder)
            for owner in self.owners:
                owner.__dict__[HOLDER_KEY].set(owner, policy)
        except BaseException:
            for owner in self.owners:
                if HOLDER_KEY in owner.__dict__:
                    owner.__dict__.pop(HOLDER_KEY).clear(owner)
            raise
        return AppliedPolicy(self)


def _chunks(model: Any) -> list[torch.nn.Module]:
    many = isinstance(model, Sequence) and not isinstance(model, str)
    chunks: list[Any] = list(model) if many else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise PolicyError(
                f"{chunk!r:.80} is no torch.nn.Module: give the model, or a list of this rank's "
                "model chunks, as Megatron's get_model returns it."
            )
    return chunks


class _Held:
    """A policy in force on one multi-token-prediction depth, or on a block: `_HeldBlock`.

    It is stored in that module, its owner, so that a copy of the owner has a copy of it, about the
    copied layers. It has no reference to the owner, which could otherwise not be freed at once.
    """

    policy: RecomputePolicy

    def __init__(
        self,
        owner: torch.nn.Module,
        layers: tuple[torch.nn.Module, ...],
        indices: tuple[int, ...],
        holder: str,
    ) -> None:
        self.holder = holder
        self.layers = layers
        self.indices = indices
        self.config = owner.config
        of_layer = (layer_modules.settings, offload_modules.settings)
        places = [place for layer in layers for each in of_layer for place in each(layer)]
        self.before = [(place, name, getattr(place, name)) for place, name in places]
        own = offload_modules.own_switch(self.config)
        self.before.append((self.config, offload_modules.SWITCH_OF_ALL, own))
        self.hooks: list[Any] = []
        self.parts: list[Part | Scope | NormAgain | EarlyBegin] = []
        """What changes the checkpoints of layers."""
        self.offloads = False

    def set(self, owner: torch.nn.Module, policy: RecomputePolicy) -> None:
        """Put the policy in force; none may be in force at the moment."""
        self.policy, self.offloads = policy, policy.offloads
        if self.offloads:
            offload_modules.forget()
            setattr(self.config, offload_modules.SWITCH_OF_ALL, True)
            self.hooks.append(owner.register_forward_pre_hook(offload_modules.begin_forward))
        ends = self.ends_of_checkpoints()
        for (layer, choice), index in zip(self.choices(), self.indices, strict=True):
            self.set_layer(layer, choice)
            if not policy.offloads:  # whose hooks are on all that a checkpoint saves
                self.parts += layer_checkpoints.put(layer, choice, index in ends)
            # What is inside a layer starts in backward only if the layer's input requires grad.
            if choice.modules or choice.inner or choice.offload:
                hook = layer.register_forward_pre_hook(_require_gradient, with_kwargs=True)
                self.hooks.append(hook)
            for one in model_layers.nested_layers(layer):
                if "core_attn" in choice.offload:
                    self.hooks += offload_modules.keep_apart(one)
                if "mlp" in choice.modules:
                    self._let_bias_leave(one)
                if choice.granularity in ("full", "inner") or "moe" in choice.modules:
                    self._let_graph_go(one)
        self.set_full(owner)

    def set_layer(self, layer: Layer, choice: LayerPolicy) -> None:
        """The modules that a layer recomputes and offloads; without offload in the policy the
        config's own stays in force."""
        layer_modules.set_modules(layer, choice.modules)
        if self.offloads:
            offload_modules.set_offload(layer, choice.offload)

    def ends_of_checkpoints(self) -> frozenset[int]:
        """Indices of the full layers after which nothing runs in their checkpoint. A depth's has
        its norm there."""
        return frozenset()

    def set_full(self, owner: torch.nn.Module) -> None:
        """Make the owner take Megatron's full-recompute branch if the policy has full layers."""
        ((layer, choice),) = self.choices()
        self.set_depth(owner, layer, choice)
        if owner.config is not self.config or choice.inner:
            self.hooks.append(owner.register_forward_pre_hook(self._begin))

    def _begin(self, owner: torch.nn.Module, _: Any) -> None:
        """Before a depth's forward: its config, as it is now."""
        ((layer, choice),) = self.choices()
        self.set_depth(owner, layer, choice)

    def set_depth(self, owner: torch.nn.Module, layer: Layer, choice: LayerPolicy) -> None:
        """Checkpoints around a depth and around the layers of the stack inside, by Megatron's own
        code in each of the two."""
        owner.config = _full_config(self.config) if choice.granularity == "full" else self.config
        if model_layers.stack_size(layer):
            layer.config = self.config_inside(choice)

    def config_inside(self, choice: LayerPolicy) -> Any:
        """The config that a depth's own stack sees."""
        return _full_config(self.config, "block", choice.inner) if choice.inner else self.config

    def clear(self, owner: torch.nn.Module) -> None:
        """Restore everything that `set` has changed."""
        if self.offloads:
            offload_modules.forget()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for part in reversed(self.parts):
            part.undo()
        self.parts.clear()
        for place, name, value in self.before:
            setattr(place, name, value)
        owner.config = self.config
        for layer in self.layers:
            if model_layers.stack_size(layer):
                layer.config = self.config

    def choices(self) -> list[tuple[torch.nn.Module, LayerPolicy]]:
        """Every layer with its choice."""
        layers = zip(self.layers, self.indices, strict=True)
        return [(layer, self.policy.layers[index]) for layer, index in layers]

    def _let_bias_leave(self, layer: torch.nn.Module) -> None:
        mlp = defects.bias_returned_by_mlp(layer)
        if mlp is not None:
            self.hooks.append(mlp.register_forward_hook(_copy_bias))

    def _let_graph_go(self, layer: Layer) -> None:
        keepers = defects.graph_keepers(layer)
        if keepers:
            hook = functools.partial(_detach_after_backward, keepers)
            self.hooks.append(layer.mlp.router.register_forward_hook(hook))


class _HeldDepths(_Held):
    """A policy in force on one multi-token-prediction layer that runs for several depths.

    The choice of a depth is in force while the depth's forward runs, and no choice in between: what
    a checkpoint runs again in backward recomputes nothing inside, but the layers of `inner`.
    """

    running: int = 0
    """The depth that runs next, counted from the layer's first."""
    backward: int = -1
    """The last backward, by autograd's number, in which a depth ran again."""
    ran_again: int = 0
    """How many depths did in that backward: the last ones, each after those that it feeds."""

    def set_full(self, owner: torch.nn.Module) -> None:
        self._rest(owner)
        if any(choice.granularity == "full" and choice.inner for _, choice in self.choices()):
            stack = self.layers[0]
            self.hooks.append(stack.register_forward_pre_hook(self._begin_again))
            self.hooks.append(stack.register_forward_hook(self._end_again, always_call=True))
        self.hooks.append(owner.register_forward_pre_hook(self._begin))
        self.hooks.append(owner.register_forward_hook(self._end, always_call=True))

    def _begin(self, owner: torch.nn.Module, _: Any) -> None:
        layer, choice = self.choices()[self.running]
        self.set_layer(layer, choice)
        self.set_depth(owner, layer, choice)

    def _end(self, owner: torch.nn.Module, _: Any, output: Any) -> None:
        """Ends a depth after its forward; if that failed, its output is None."""
        running = self.running
        self._rest(owner)
        self.running = 0 if output is None else (running + 1) % len(self.indices)

    def _begin_again(self, stack: torch.nn.Module, _: Any) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return
        if backward != self.backward:
            self.backward, self.ran_again = backward, 0
        full = [choice for _, choice in self.choices() if choice.granularity == "full"]
        self.ran_again += 1
        stack.config = self.config_inside(full[-self.ran_again])

    def _end_again(self, stack: torch.nn.Module, _: Any, __: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            stack.config = self.config

    def _rest(self, owner: torch.nn.Module) -> None:
        self.running = 0
        self.set_layer(self.layers[0], NONE)
        self.set_depth(owner, self.layers[0], NONE)


class _HeldBlock(_Held):
    """A policy in force on one block."""

    runs: Sequence[Run] = ()
    """What its checkpointed forward runs, one after the other."""
    ran: bool = False
    """Whether this forward did."""

    def ends_of_checkpoints(self) -> frozenset[int]:
        ends: list[int] = []
        for run in self.policy.chunk_runs(self.indices):
            group = run.policy.group
            ends += self.indices[run.start : run.start + run.count][group - 1 :: group]
        return frozenset(ends)

    def set_full(self, owner: torch.nn.Module) -> None:
        runs: Sequence[Run] = self.policy.chunk_runs(self.indices)
        if any(run.policy.granularity == "full" for run in runs):
            if any(map(layer_parts.attends_to_context, self.layers)):
                runs = _layer_by_layer(runs)
            self.runs = _without_modules(runs)
            self.hooks.append(owner.register_forward_pre_hook(_take_full_branch))
            seam.redirect(owner, _run_by_segments)
            self.ran = False
            if any(run.policy.ahead for run in self.runs):
                self.parts.append(EarlyBegin())
            self.hooks.append(owner.register_forward_hook(_check_that_it_ran, always_call=True))

    def clear(self, owner: torch.nn.Module) -> None:
        seam.restore(owner)
        super().clear(owner)


def _take_full_branch(block: torch.nn.Module, _: Any) -> None:
    """Before a block's forward: its config, as it is now, with full recompute."""
    block.config = _full_config(block.__dict__[HOLDER_KEY].config)


def _check_that_it_ran(block: torch.nn.Module, _: Any, output: Any) -> None:
    """After a block's training forward: a policy with full layers ran in it. After one that failed,
    which has no output, nothing is known.

    Raises:
        ApplyError: it did not, because somebody else replaced Megatron's checkpointed forward.
    """
    held = block.__dict__[HOLDER_KEY]
    block.config = held.config
    ran, held.ran = held.ran, False
    if output is not None and block.training and torch.is_grad_enabled() and not ran:
        raise ApplyError(
            f"The forward of a {type(block).__name__} did not run the policy in force on it "
            f"({held.policy.format():.80}): something replaced Megatron's checkpointed forward "
            "after the policy was applied, and would recompute every layer. Apply the policy "
            "after that, or choose one without full layers."
        )


def _compare_before_training(block: torch.nn.Module, _: Any) -> None:
    """Compare policies in the first forward with gradients, among ranks with collectives inside it.

    These ranks wait for each other there anyway. A forward that one rank may run alone compares
    nothing.
    """
    if block.training and torch.is_grad_enabled():
        held = block.__dict__[HOLDER_KEY]
        held.compared.remove()
        agree_on(lambda: held.policy, parallel.groups_inside(block))


def _check_depth(choice: LayerPolicy, index: int, site: model_layers.MtpSite) -> None:
    stack = model_layers.stack_size(site.layer)  # 0 if the depth has a single layer
    if choice.own and len(site.indices) > 1:
        raise PolicyError(
            f"{choice} on layer {index}, one of several multi-token-prediction depths that one "
            f"layer runs (mtp_use_repeated_layer): {', '.join(choice.own)} would change all of "
            "them. Use Megatron's choices there."
        )
    if choice.group > 1:
        raise PolicyError(
            f"{choice} on layer {index}, a multi-token-prediction depth: Megatron checkpoints each "
            "depth by itself; write full."
        )
    if choice.inner > stack:
        raise PolicyError(
            f"{choice} on layer {index}, a multi-token-prediction depth with "
            f"{f'{stack} layers' if stack else 'no stack of its own'} inside; write full or none"
            f"{f', or a number up to {stack}' if stack else ''}."
        )


def _check_groups(site: model_layers.BlockSite, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.policy.group > 1 and layer_parts.attends_to_context(site.block.layers[run.start]):
            raise PolicyError(
                f"{run.policy} from layer {site.layers[run.start]}, which attends to an encoder: "
                "gradients of the encoder's output would be added in another order, so that "
                "results differ in their last bits. Use full there, one checkpoint per layer."
            )


def _require_gradient(
    layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a layer's input require grad, for the checkpoints inside it, as `_with_gradient` does.

    Symptom without it after frozen embeddings: norms under `layernorm` and adapters under `mlp`
    get no gradient; a frozen norm's recompute ends in "forward() missing ... argument", because
    CheckpointWithoutOutput kept its input in a context that autograd dropped.
    """
    if torch.is_grad_enabled() and "hidden_states" in kwargs:
        kwargs["hidden_states"] = _with_gradient(kwargs["hidden_states"], [layer])
    return args, kwargs


def _copy_bias(_: torch.nn.Module, __: Any, output: tuple[Any, Any]) -> tuple[Any, Any]:
    hidden_states, bias = output
    return hidden_states, None if bias is None else bias.clone()


def _detach_after_backward(
    keepers: Sequence[Any], _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]
) -> None:
    """Detach the tensors in `keepers` when the gradient of the router's probabilities arrives.

    Everything that uses the probabilities has run by then, forward and backward, because Megatron
    runs the whole backward of a layer before another microbatch's recompute. See
    `defects.graph_keepers`.
    """

    def detach(_: torch.Tensor) -> None:
        for keeper in keepers:
            for name, value in vars(keeper).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(keeper, name, value.detach())

    probabilities, _ = output
    if probabilities.requires_grad:
        probabilities.register_hook(detach)


def _full_config(config: Any, method: str = "uniform", num_layers: int = 1) -> Any:
    return _copied(
        config,
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=num_layers,
    )


def _behind_frozen(
    block: Block, held: _HeldBlock, hidden_states: torch.Tensor, context: Any
) -> Sequence[Run]:
    """The runs of a block, the first ones without a checkpoint around layers whose parameters are
    all frozen, if no input requires grad.

    Nothing of such layers is saved, so a checkpoint saves nothing either; its input would be made
    to require grad, for other layers inside it, and be kept and run again for nothing.
    """
    if any(getattr(each, "requires_grad", False) for each in (hidden_states, context)):
        return held.runs
    trains = [_trains(layer) for layer in block.layers]
    frozen = trains.index(True) if True in trains else len(trains)
    cut: list[Run] = []
    for run in held.runs:
        at, choice = run.start, run.policy
        inside = min(max(0, frozen - at), run.count) if choice.granularity == "full" else 0
        begun = min(run.count - inside, -inside % choice.group)  # of a group that is partly frozen
        cut += [
            Run(at, inside, NONE),
            Run(at + inside, begun, replace(choice, group=max(1, begun))),
            Run(at + inside + begun, run.count - inside - begun, choice),
        ]
    return [run for run in cut if run.count]


def _trains(layer: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _run_by_segments(
    block: Block,
    hidden_states: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """Megatron's checkpointed forward of a block, one run of equal layers after the other."""
    held: _HeldBlock = block.__dict__[HOLDER_KEY]
    held.ran = True
    megatron_forward = seam.checkpointed_forward(block)
    features: list[torch.Tensor] = []
    returns_features = bool(kwargs.get("extract_layer_indices"))
    offset = kwargs.get("layer_offset", 0)
    if isinstance(kwargs.get("deepstack_visual_embeds"), list):
        stacked = defects.stacked_features(block, kwargs["deepstack_visual_embeds"])
        kwargs["deepstack_visual_embeds"] = stacked
    block_layers = list(block.layers)
    for run in _behind_frozen(block, held, hidden_states, kwargs.get("context")):
        layers: Any = block_layers[run.start : run.start + run.count]
        # `block` with 0 layers is Megatron's path without checkpoints.
        how: tuple[str, int] = ("block", 0)
        if run.policy.granularity == "full":
            how = ("uniform", run.policy.group)
            hidden_states = _with_gradient(hidden_states, layers)
        elif defects.LayersWithPaddingMask.needed():
            layers = defects.LayersWithPaddingMask(layers, kwargs.get("padding_mask"))
        if "layer_offset" in kwargs:
            kwargs["layer_offset"] = offset + run.start
        view = _copied(
            block,
            config=_full_config(held.config, *how),
            layers=layers,
            num_layers_per_pipeline_rank=run.count,
        )
        seam.restore(view)
        with begin_early() if run.policy.ahead else contextlib.nullcontext():
            output = megatron_forward(view, hidden_states=hidden_states, **kwargs)
        # Since 0.17 it also returns the outputs of the layers in extract_layer_indices; a class
        # with its own checkpointed forward may return features of layers (Qwen3-VL).
        returns_features = isinstance(output, tuple)
        hidden_states, more = output if returns_features else (output, [])
        features += more
        if kwargs.get("context") is not None:
            # With a view, its gradients add up from the last layer to the first, as without
            # checkpoints.
            kwargs["context"] = kwargs["context"].view_as(kwargs["context"])
    return (hidden_states, features) if returns_features else hidden_states


def _without_modules(runs: Sequence[Run]) -> list[Run]:
    """Merge neighbouring runs without checkpoints: their modules are attributes of the layers."""
    merged: list[Run] = []
    for run in runs:
        if run.policy.granularity != "full":
            run = Run(run.start, run.count, LayerPolicy())
            if merged and merged[-1].policy == run.policy:
                last = merged.pop()
                run = Run(last.start, last.count + run.count, run.policy)
        merged.append(run)
    return merged


def _layer_by_layer(runs: Sequence[Run]) -> list[Run]:
    """Split runs so that every checkpoint is one run.

    A run of two checkpoints would add their gradients of the encoder's output first, which changes
    the order of the sum.
    """
    single: list[Run] = []
    for run in runs:
        if run.policy.granularity == "full":
            single += [Run(run.start + at, 1, run.policy) for at in range(run.count)]
        else:
            single.append(run)
    return single


def _with_gradient(hidden_states: torch.Tensor, layers: Iterable[torch.nn.Module]) -> torch.Tensor:
    """Make a checkpoint's input require grad; otherwise its parameters silently get no gradient.

    Megatron's CheckpointFunction is reentrant, so this happens after frozen embeddings (LoRA).
    """
    if hidden_states.requires_grad or not any(map(_trains, layers)):
        return hidden_states
    return hidden_states.detach().requires_grad_()


def agree_on(
    find: Callable[[], RecomputePolicy], groups: Sequence[Any] | None = None
) -> RecomputePolicy:
    """This rank's policy, compared with those of other ranks: one error on every rank.

    Args:
        find: returns the policy; raises an error if there is none that can run on this rank.
        groups: process groups to compare in; by default the group of all ranks of this stage.

    Raises:
        ApplyError: the ranks hold different policies, or another rank refused its own.
    """
    error: AutorecomputeError | None = None
    mine = ""
    try:
        policy = find()
        mine = policy.digest()
    except AutorecomputeError as raised:
        error, mine = raised, f"refused: {raised}"
    for group in parallel.stage_groups() if groups is None else groups:
        said: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(said, mine, group=group)
        if error is None and len(set(said)) > 1:
            ranks = torch.distributed.get_process_group_ranks(group)
            held = "; ".join(f"rank {r}: {s}" for r, s in zip(ranks, said, strict=True))
            error = ApplyError(
                "The ranks of this pipeline stage were given different policies, and their "
                f"collectives would wait for each other forever: {held}. Give all the same."
            )
    if error is not None:
        raise error
    return policy
