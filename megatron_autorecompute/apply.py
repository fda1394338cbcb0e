"""Running a policy: Megatron's own checkpointed forward, one run of equal layers at a time.

Nothing of Megatron's forward is rewritten here. A block whose policy has full layers takes
Megatron's full-recompute branch; there, each run of layers goes to Megatron's own function through
a view of the block that shows it just these layers and the method to use on them. Selective
modules are the attributes Megatron itself reads (see `compat`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from megatron_autorecompute import compat
from megatron_autorecompute.errors import ApplyError, AutorecomputeError, PolicyError
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy, Run

HOLDER_KEY = "_autorecompute_holder"


def live_view(original: Any, **overrides: Any) -> Any:
    """An object that shares all state with `original`, now and later, except what is overridden."""
    kind = type(original)
    shown = {name: property(lambda _, value=value: value) for name, value in overrides.items()}
    view_type = type(kind.__name__, (kind,), {**shown, "__module__": kind.__module__})
    view = object.__new__(view_type)
    object.__setattr__(view, "__dict__", original.__dict__)
    return view


class AppliedPolicy:
    """A policy in force on a model, until `undo()` or the end of the `with` block."""

    def __init__(self, sites: _Sites, policy: RecomputePolicy, holder: str) -> None:
        self.policy = policy
        self._sites = sites
        self._saved = sites.save()
        self._active = True
        sites.hold(holder)
        sites.set(policy)

    def switch(self, policy: RecomputePolicy) -> None:
        """Run `policy` from the next step on; call it between steps, on all ranks of a stage.

        Raises:
            PolicyError: the model cannot run it; the policy in force stays.
            ApplyError: already undone, or the ranks of this stage were given different policies.
        """
        if not self._active:
            raise ApplyError("This policy was undone; apply the new one with apply(policy, model).")
        agree_on(policy, functools.partial(self._sites.check, policy))
        self._sites.clear(self._saved)
        self._sites.set(policy)
        self.policy = policy

    def undo(self) -> None:
        """Give the model back exactly as it was; undoing twice does nothing."""
        if self._active:
            self._sites.clear(self._saved)
            self._sites.release()
            self._active = False

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def apply(
    policy: RecomputePolicy,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    holder: str = "megatron_autorecompute.apply",
) -> AppliedPolicy:
    """Make a built model recompute as `policy` says, from its next forward on.

    Args:
        policy: one choice for every layer of the whole model, on every rank.
        model: this rank's model chunks, wrapped (DDP, Float16Module) or bare, or a single block.
        holder: who applies it, for the error that a second application raises.

    Raises:
        PolicyError: wrong length, a group across chunks, an unknown module, or a choice that
            Megatron refuses for this model, with its reason.
        ApplyError: a policy is already in force here, or ranks of this stage disagree.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    sites = _Sites(chunks)
    agree_on(policy, functools.partial(sites.check, policy, new=True))
    return AppliedPolicy(sites, policy, holder)


def apply_at_construction(
    policy: RecomputePolicy, module: torch.nn.Module, *, holder: str
) -> AppliedPolicy:
    """`apply` for a block just built: ranks compare policies at its first forward, not here.

    A constructor must not wait for other ranks: not every rank builds the same blocks.
    """
    sites = _Sites([module])
    sites.check(policy, new=True)
    applied = AppliedPolicy(sites, policy, holder)

    def on_first_forward(*_: Any) -> None:
        handle.remove()
        agree_on(policy, lambda: None)

    handle = module.register_forward_pre_hook(on_first_forward)
    return applied


class _Sites:
    """The places in a model where a policy takes hold, and what was there before."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        chunks = list(chunks)
        self.blocks = compat.block_sites(chunks)
        self.mtps = compat.mtp_sites(chunks)
        self.layers = compat.layers(chunks)
        self.encoder_layers = compat.encoder_layers(chunks)
        self.owners = [s.block for s in self.blocks] + [s.mtp for s in self.mtps]
        if not self.owners:
            raise PolicyError("No TransformerBlock in this model: there is nothing to recompute.")
        configs = [owner.config for owner in self.owners]
        self.configs = list({id(config): config for config in configs}.values())
        self._hooks: list[Any] = []

    def check(self, policy: RecomputePolicy, new: bool = False) -> None:
        """Raise what speaks against running `policy` here."""
        for owner in self.owners:
            if new and HOLDER_KEY in owner.__dict__:
                raise ApplyError(
                    "A policy is already in force on this model, applied by "
                    f"{owner.__dict__[HOLDER_KEY]}: undo() it or switch() to the new one."
                )
        num_layers = compat.num_policy_layers(self.configs[-1], self.encoder_layers)
        policy.checked_length(num_layers, "The policy")
        for config in self.configs:
            if compat.own_recompute(config) is not None:
                raise PolicyError(
                    "The model was built with Megatron's own recompute settings as well as a "
                    "policy: leave them out; the same thing as a policy is "
                    f"{compat.own_recompute(config)!r}."
                )
            compat.check_allowed(config, policy)
        compat.check_compiler(policy)
        for site in self.blocks:
            _check_groups(site, policy.chunk_runs(site.layers))
        for mtp in self.mtps:
            if policy.layers[mtp.index].group > 1:
                raise PolicyError(
                    f"{policy.layers[mtp.index]} on layer {mtp.index}, a multi-token-prediction "
                    "depth: Megatron checkpoints each depth by itself; write full."
                )

    def save(self) -> list[tuple[Any, str, Any]]:
        """Every attribute that `set` may change, with its value now."""
        places = [(owner, "config") for owner in self.owners]
        places += [place for layer, _ in self.layers for place in compat.settings(layer)]
        return [(owner, name, getattr(owner, name)) for owner, name in places]

    def set(self, policy: RecomputePolicy) -> None:
        for layer, index in self.layers:
            compat.set_modules(layer, policy.layers[index].modules)
            if "mlp" in policy.layers[index].modules:
                self._let_bias_leave(layer)
            if policy.layers[index].granularity == "full" or "moe" in policy.layers[index].modules:
                self._let_graph_go(layer)
        for site in self.blocks:
            self._let_gradient_in(site, policy)
            runs = policy.chunk_runs(site.layers)
            if any(run.policy.granularity == "full" for run in runs):
                _run_by_segments(site.block, runs)
        for mtp in self.mtps:
            if policy.layers[mtp.index].modules:
                self._require_gradient_of([mtp.layer])
            if policy.layers[mtp.index].granularity == "full":
                mtp.mtp.config = _full_config(mtp.mtp.config, 1)

    def _let_gradient_in(self, site: compat.BlockSite, policy: RecomputePolicy) -> None:
        """Where a block's input requires grad, so do its layers': they need no look of their own.

        Looked at in every forward, as parameters may be frozen after a policy is in force.
        """
        layers = [
            layer
            for layer, index in zip(site.block.layers, site.layers, strict=True)
            if policy.layers[index].modules
        ]

        def on_forward(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_states = kwargs.get("hidden_states", args[0] if args else None)
            if torch.is_grad_enabled() and not getattr(hidden_states, "requires_grad", True):
                hook.remove()
                self._require_gradient_of(layers)

        if layers:
            hook = site.block.register_forward_pre_hook(on_forward, with_kwargs=True)
            self._hooks.append(hook)

    def _require_gradient_of(self, layers: Iterable[torch.nn.Module]) -> None:
        for layer in layers:
            hook = layer.register_forward_pre_hook(_require_gradient, with_kwargs=True)
            self._hooks.append(hook)

    def _let_bias_leave(self, layer: torch.nn.Module) -> None:
        mlp = compat.bias_returned_by_mlp(layer)
        if mlp is not None:
            self._hooks.append(mlp.register_forward_hook(_copy_bias))

    def _let_graph_go(self, layer: torch.nn.Module) -> None:
        keepers = compat.graph_keepers(layer)
        if keepers:
            hook = functools.partial(_detach_after_backward, keepers)
            self._hooks.append(layer.mlp.router.register_forward_hook(hook))

    def clear(self, saved: list[tuple[Any, str, Any]]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for site in self.blocks:
            compat.restore(site.block)
        for owner, name, value in saved:
            setattr(owner, name, value)

    def hold(self, holder: str) -> None:
        for owner in self.owners:
            owner.__dict__[HOLDER_KEY] = holder

    def release(self) -> None:
        for owner in self.owners:
            owner.__dict__.pop(HOLDER_KEY, None)


def _check_groups(site: compat.BlockSite, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.policy.group > 1 and compat.attends_to_context(site.block.layers[run.start]):
            raise PolicyError(
                f"{run.policy} from layer {site.layers[run.start]}, which attends to an encoder: "
                "gradients of the encoder's output would add up in another order, so that results "
                "differ in their last bits. Use full there, one checkpoint a layer."
            )


def _require_gradient(
    layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same need as a full layer's, see `_with_gradient`, for the checkpoints inside a layer.

    Symptom without it behind frozen embeddings: norms under `layernorm` and adapters under `mlp`
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
    """Let `keepers` lose their graph when the gradient of the router's probabilities arrives.

    All that uses the probabilities has run by then, forward and backward, since Megatron runs the
    whole backward of a layer before another microbatch's recompute. See `compat.graph_keepers`.
    """

    def detach(_: torch.Tensor) -> None:
        for keeper in keepers:
            for name, value in vars(keeper).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(keeper, name, value.detach())

    probabilities, _ = output
    if probabilities.requires_grad:
        probabilities.register_hook(detach)


def _full_config(config: Any, group: int) -> Any:
    return live_view(
        config,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=group,
    )


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of layers of one block, as Megatron's checkpointed forward gets to see it."""

    view: Any
    start: int
    recomputes: bool
    layers: Sequence[Any] | compat.LayersWithPaddingMask


def _segment(block: torch.nn.Module, run: Run) -> _Segment:
    layers: Any = list(block.layers)[run.start : run.start + run.count]
    config = _full_config(block.config, run.policy.group)
    recomputes = run.policy.granularity == "full"
    if not recomputes:
        # `block` with no layer to recompute is Megatron's un-checkpointed path.
        config = live_view(config, recompute_method="block", recompute_num_layers=0)
        if compat.LayersWithPaddingMask.needed():
            layers = compat.LayersWithPaddingMask(layers)
    view = live_view(block, config=config, layers=layers, num_layers_per_pipeline_rank=run.count)
    return _Segment(view, run.start, recomputes, layers)


def _run_by_segments(block: torch.nn.Module, runs: Sequence[Run]) -> None:
    """Send the block into Megatron's full-recompute branch, and from there through `runs`."""
    megatron_forward = compat.checkpointed_forward(block)
    runs = _without_modules(runs)
    if any(map(compat.attends_to_context, block.layers)):
        runs = _layer_by_layer(runs)
    segments = [_segment(block, run) for run in runs]

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        features: list[torch.Tensor] = []
        offset = kwargs.get("layer_offset", 0)
        for segment in segments:
            if segment.recomputes:
                hidden_states = _with_gradient(hidden_states, segment.layers)
            elif isinstance(segment.layers, compat.LayersWithPaddingMask):
                segment.layers.padding_mask = kwargs.get("padding_mask")
            if "layer_offset" in kwargs:
                kwargs["layer_offset"] = offset + segment.start
            output = megatron_forward(segment.view, hidden_states=hidden_states, **kwargs)
            # Since 0.17 the layers' outputs asked for in extract_layer_indices come along.
            hidden_states, more = output if isinstance(output, tuple) else (output, [])
            features += more
            if kwargs.get("context") is not None:
                # Its gradients add up from the last layer to the first, as without checkpoints.
                kwargs["context"] = kwargs["context"].view_as(kwargs["context"])
        return (hidden_states, features) if kwargs.get("extract_layer_indices") else hidden_states

    block.config = _full_config(block.config, 1)
    compat.redirect(block, forward)


def _without_modules(runs: Sequence[Run]) -> list[Run]:
    """Merge neighbours that take the un-checkpointed path: their modules are attributes."""
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
    """Every checkpoint a run of its own.

    A run of two would add up what both say of the context before what later runs say of it.
    """
    single: list[Run] = []
    for run in runs:
        if run.policy.granularity == "full":
            single += [Run(run.start + at, 1, run.policy) for at in range(run.count)]
        else:
            single.append(run)
    return single


def _with_gradient(hidden_states: torch.Tensor, layers: Iterable[torch.nn.Module]) -> torch.Tensor:
    """A checkpoint's input must require grad, or its parameters silently get none.

    That is the case behind frozen embeddings (LoRA): Megatron's CheckpointFunction is reentrant.
    """
    if hidden_states.requires_grad or not any(
        parameter.requires_grad for layer in layers for parameter in layer.parameters()
    ):
        return hidden_states
    return hidden_states.detach().requires_grad_()


def agree_on(policy: RecomputePolicy, check: Any) -> None:
    """Run `check` here and compare digests with all ranks of this stage: one error on every rank.

    Raises:
        ApplyError: the ranks hold different policies, or another rank refused its own.
    """
    error: AutorecomputeError | None = None
    try:
        check()
    except AutorecomputeError as raised:
        error = raised
    group = compat.stage_group()
    if group is not None:
        said: list[Any] = [None] * torch.distributed.get_world_size(group)
        mine = policy.digest() if error is None else f"refused: {error}"
        torch.distributed.all_gather_object(said, mine, group=group)
        if error is None and len(set(said)) > 1:
            ranks = torch.distributed.get_process_group_ranks(group)
            held = "; ".join(f"rank {r}: {s}" for r, s in zip(ranks, said, strict=True))
            error = ApplyError(
                "The ranks of this pipeline stage were given different policies, and their "
                f"collectives would wait for each other for ever: {held}. Give all the same."
            )
    if error is not None:
        raise error
