"""Megatron Bridge: `cfg.model.recompute_policy` in a recipe, on the command line and in YAML.

    from megatron_autorecompute.integrations import megatron_bridge
    megatron_bridge.install()                          # before megatron.bridge is imported
    from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
    ...
    cfg = llama3_8b_pretrain_config()
    megatron_bridge.set_policy(cfg.model, "auto")
    megatron_bridge.pretrain(cfg, forward_step)        # Bridge's own, with our callback

`auto` is `attach`, as in any other loop: this module tells it what it knows of the job, and calls
it around every step. Written for Bridge 0.3.1; docs/bridge.md lists what was read and run of 0.6.0.
Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.block_names import Blocks, parts_of_field
from megatron_autorecompute.errors import ApplyError, OptionError
from megatron_autorecompute.megatron_fields import POLICY_FIELD
from megatron_autorecompute.planner import launch_lines
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.auto_options import (
    AutoOptions,
    refuse_for_auto,
    refuse_percentile,
    refuse_without_auto,
)

if TYPE_CHECKING:
    from megatron_autorecompute.runtime.controller import Auto

HOLDER = "the recompute_policy of a Megatron Bridge config"
OUTSIDE_CONFIGS = (
    ("dataset", "skip_getting_attention_mask_from_dataset"),
    ("dataset", "reset_attention_mask"),
    ("dist", "use_tp_pp_dp_mapping"),
    ("train", "empty_unused_memory_level"),
)
"""Settings that change bytes or times of a step; the counterpart of
`integrations.megatron_lm.OUTSIDE_CONFIGS`."""


def install() -> None:
    """Make `recompute_policy` a field of every Bridge model config; call before importing Bridge.

    A second call changes nothing.

    Raises:
        ApplyError: Bridge was imported first, so its classes were made without the field.
        UnsupportedVersionError: this version of megatron-core is not supported.
    """
    from megatron_autorecompute.runtime import config_field

    if "megatron.bridge" in sys.modules and not config_field.has_field():
        raise ApplyError(
            "megatron.bridge was imported before recompute_policy was made a field, and its config "
            "classes are without it. Move these two lines to the top of the program, above the "
            "first import of megatron.bridge (also indirect, through a recipe):\n"
            "    from megatron_autorecompute.integrations import megatron_bridge\n"
            "    megatron_bridge.install()"
        )
    config_field.install()


def set_policy(model: Any, policy: str | list[str] | dict[str, Any] | None) -> None:
    """Give a recipe's model a policy, in place of the recipe's own recompute settings.

    Args:
        model: `cfg.model`, a provider or a ModelConfig.
        policy: "auto", a policy's text, "@FILE", a list with one choice per layer, or None.

    Raises ApplyError: the config's class lacks the field, because `install()` was not called.
    """
    config = _core_config(model)
    if POLICY_FIELD not in type(config).__dataclass_fields__:
        raise ApplyError(
            f"{type(config).__name__} has no field recompute_policy: call "
            "megatron_bridge.install() above the first import of megatron.bridge."
        )
    for name, value in {**megatron_fields.NO_RECOMPUTE, POLICY_FIELD: policy}.items():
        setattr(config, name, value)


def _core_config(model: Any) -> Any:
    from megatron_autorecompute.compat import stage_layout

    return stage_layout.transformer_config(model)


# --- a policy in Megatron's own fields ------------------------------------------------------------


def fields_of_policy(policy: RecomputePolicy, model: Any) -> dict[str, Any] | None:
    """The policy in Megatron's own fields, or None if they cannot express or run it. `uniform` and
    `block` count in the chunks of the pipeline layout of `model`, which is `cfg.model`."""
    from megatron_autorecompute.compat import stage_layout

    config = _core_config(model)
    return megatron_fields.of_policy(
        policy,
        stage_layout.counted_chunks(config),
        linear_bias=config.add_bias_linear,
        depth_layers=stage_layout.depth_layers(config),
    )


# --- before training ------------------------------------------------------------------------------


def resolve(cfg: Any) -> RecomputePolicy | None:
    """Check the policy in a config, and write it back in the form in which it is saved.

    A policy that Megatron's own fields can express is written to these fields alone, so that a
    saved config and its checkpoint load without this package. Any other becomes a list with one
    choice per layer, so that it does not depend on the file it came from. With PEFT it always
    becomes a list: Megatron's own recompute can leave adapters after frozen layers without
    gradients, and Bridge's `maybe_enable_recompute_inputs_grad` mends this for `full` only.
    One that names several blocks becomes a dict with the names; only the built model can check it.

    Returns:
        The policy, or None when there is none, it is `auto` or it names several blocks.

    Raises:
        PolicyError: it does not fit the model, Bridge or Megatron refuse it, or Megatron's own
            recompute fields are set as well.
        OptionError: `auto` together with settings that it cannot measure.
    """
    from megatron_autorecompute.compat import rules, stage_layout
    from megatron_autorecompute.runtime import config_field

    config = _core_config(cfg.model)
    value = getattr(config, POLICY_FIELD, None)
    if value is None:
        return None
    config_field.refuse_contradiction(config)
    if value == "auto":
        refuse_for_auto(AutoOptions(), config)
        return None
    value = config_field.without_file(value, config)
    if config_field.names_several_blocks(value):
        setattr(config, POLICY_FIELD, dict(parts_of_field(value) or {}))
        return None
    policy = stage_layout.read_policy(value, config)
    if getattr(cfg.comm_overlap, "overlap_moe_expert_parallel_comm", False):
        as_trained = copy.copy(config)
        as_trained.overlap_moe_expert_parallel_comm = True  # as Bridge does when it trains
        rules.check_allowed(as_trained, policy)
    fields = None if cfg.peft is not None else fields_of_policy(policy, cfg.model)
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    setattr(config, POLICY_FIELD, None if fields is not None else policy.to_config())
    return policy


def policy_hook(value: Any, in_fields: bool = False) -> Callable[[list[Any]], list[Any]]:
    """A pre-wrap hook that puts a policy in force on every bare chunk.

    Blocks built from a config with the field already run it; then the hook makes all ranks of a
    stage compare it. If a model built its blocks from another config, the hook applies it; so it
    does with a policy by block names, because only the built model knows its blocks. One without
    names is refused for a model of several blocks: a recipe copies the decoder's fields to its
    tower, or leaves them out, as it likes.

    Args:
        value: a policy, or what the config field takes.
        in_fields: whether Megatron's own fields say it, so that it runs by itself.

    Raises (the hook):
        ApplyError: only some blocks run it, or ranks have different policies.
        PolicyError: no block of this model can run a policy, it does not fit the model's blocks,
            which are named, or Megatron refuses it.
    """

    def hook(chunks: list[Any]) -> list[Any]:
        from megatron_autorecompute.compat import model_layers
        from megatron_autorecompute.runtime import config_field
        from megatron_autorecompute.runtime.apply import HOLDER_KEY, agree_on, apply

        config_field.refuse_without_names(value, chunks)
        held: list[Any] = [
            vars(site.block).get(HOLDER_KEY) for site in model_layers.block_sites(chunks)
        ]
        if in_fields:
            return chunks
        if held and all(held):
            agree_on(lambda: held[0].policy)
        else:
            apply(value, chunks, holder=HOLDER)
        return chunks

    return hook


def register(model: Any, hook: Callable[[list[Any]], list[Any]]) -> None:
    """Add a pre-wrap hook to a provider, or to a ModelConfig (since 0.4)."""
    if hasattr(model, "register_pre_wrap_hook"):
        model.register_pre_wrap_hook(hook)
    else:
        model.pre_wrap_hooks.append(hook)


# --- training -------------------------------------------------------------------------------------


def pretrain(
    cfg: Any,
    forward_step_func: Callable[..., Any],
    callbacks: Sequence[Any] = (),
    *,
    options: AutoOptions | None = None,
) -> None:
    """Bridge's `pretrain` with the policy in `cfg.model.recompute_policy`; with None just that.

    Args:
        cfg: Bridge's ConfigContainer.
        forward_step_func: as Bridge takes it.
        callbacks: Bridge callbacks of your own.
        options: of `auto`; without a plan path the plan goes to the folder of `checkpoint.save`.

    Raises AutorecomputeError: the policy or plan cannot work; if possible, raised before any model
    is built.
    """
    from megatron.bridge.training.pretrain import pretrain as bridge_pretrain

    options = options or AutoOptions()
    config = _core_config(cfg.model)
    given = getattr(config, POLICY_FIELD, None)
    refuse_without_auto(options, given)
    if given is not None:
        setattr(config, POLICY_FIELD, options.field_of(given))
    if given == "auto":
        refuse_percentile(options, config)
        refuse_for_auto(options, config)
    if options.recompute_run_on_cpu:
        raise OptionError(
            "--recompute-run-on-cpu was given, but Megatron Bridge trains on CUDA devices only. "
            "Leave it out; Megatron-LM runs on CPU with python -m megatron_autorecompute.pretrain."
        )
    resolve(cfg)
    if given == "auto":
        with claimed(), callback(options) as tuning:
            bridge_pretrain(cfg, forward_step_func, [tuning, *callbacks])
        return
    if given is not None:
        value = getattr(config, POLICY_FIELD)
        register(cfg.model, policy_hook(value or given, in_fields=value is None))
    bridge_pretrain(cfg, forward_step_func, list(callbacks))


@contextmanager
def claimed() -> Iterator[None]:
    """Allows models to be built with `auto` in their field, as long as the block runs."""
    from megatron_autorecompute.runtime import config_field

    config_field.claim_auto(HOLDER)
    try:
        yield
    finally:
        config_field.release_auto(HOLDER)


@contextmanager
def callback(options: AutoOptions) -> Iterator[Any]:
    """A Bridge callback that runs `auto`; it releases model and optimizer when the block ends.

    If training fails within a step, the step's context ends with the error, as in a `with`.
    """
    from megatron.bridge.training.callbacks import Callback

    with ExitStack() as job, ExitStack() as step:

        class AutorecomputeCallback(Callback):
            """Measures, decides and watches in ordinary training steps; see `Auto`."""

            def on_train_start(self, context: Any) -> None:
                self.auto = _attached(context.model, context.optimizer, context.state, options)
                job.callback(self.auto.close)

            def on_train_step_start(self, context: Any) -> None:
                step.enter_context(self.auto.step())

            def on_train_step_end(self, context: Any) -> None:
                step.close()

            def on_train_end(self, context: Any) -> None:
                self.auto.require_plan()
                if self.auto.is_planned:
                    _say_lines(self.auto.policy, context.state.cfg, context.model)

        yield AutorecomputeCallback()


def _attached(model: Any, optimizer: Any, state: Any, options: AutoOptions) -> Auto:
    from megatron.bridge.utils.common_utils import print_rank_0

    from megatron_autorecompute.runtime.attach import attach
    from megatron_autorecompute.runtime.job_facts import Program

    program = Program(
        options=options,
        save=state.cfg.checkpoint.save,
        micro_batch_size=state.cfg.train.micro_batch_size,
        seq_length=state.cfg.model.seq_length,
        timers=state.timers,
        shapes=shapes_of(state.cfg),
        writers=lambda: [w for w in (state.tensorboard_logger, state.wandb_logger) if w],
        iteration=lambda: state.train_state.step,
    )
    return attach(model, optimizer, say=print_rank_0, program=program)


def shapes_of(cfg: Any) -> dict[str, str]:
    """Facts that a plan depends on and only Bridge's config has, not Megatron-Core's."""
    given = {
        f"{part}.{name}": getattr(getattr(cfg, part, None), name, None)
        for part, name in OUTSIDE_CONFIGS
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _say_lines(policy: RecomputePolicy, cfg: Any, model: Any) -> None:
    from megatron.bridge.utils.common_utils import print_rank_0

    from megatron_autorecompute.runtime.apply import blocks

    lines = "\n".join(recipe_lines(policy, cfg, blocks(model)))
    print_rank_0(f"recompute auto: to keep this policy without measuring, in the recipe:\n{lines}")


def recipe_lines(policy: RecomputePolicy, cfg: Any, blocks: Blocks | None = None) -> list[str]:
    """Python lines that set the policy in a recipe, in the form that `resolve` writes; of several
    blocks of a model each by its name."""
    alone = cfg.peft is None and len(blocks or ()) < 2
    fields = fields_of_policy(policy, cfg.model) if alone else None
    return launch_lines.recipe_lines(policy, fields, blocks)
