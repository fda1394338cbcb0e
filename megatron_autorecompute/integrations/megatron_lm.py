"""Connects this package to a Megatron-LM training job, by decorators on Megatron's functions.

Each decorator names the one Megatron function it is for. The launcher (`pretrain`) applies them at
run time with `install()`; the files under `patches/` write the same decorators into Megatron's
sources. So both ways do the same. The decorated functions have the same names and arguments from
core_r0.16.0 to main of August 2026.

Importing this module imports neither torch nor megatron: patched sources import it from within
their own modules, before those are complete.
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_autorecompute.block_names import DECODER, ENCODER, parts_of_field
from megatron_autorecompute.errors import ApplyError, AutorecomputeError, MachineError
from megatron_autorecompute.options import add_flags, from_flags
from megatron_autorecompute.planner.cost.hybrid_pattern import check_flags
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.auto_options import (
    AutoOptions,
    refuse_for_auto,
    refuse_percentile,
    refuse_without_auto,
)

if TYPE_CHECKING:
    from megatron_autorecompute.runtime.controller import Auto

Function = Callable[..., Any]

HOLDER = "Megatron-LM's training job"
RANK_0_SPEAKS_S = 10.0
"""Seconds for which other ranks let rank 0 print an error. torchrun ends them 0.1 s after it."""


_MARK = "_autorecompute"
_auto: Auto | None = None
job_policy: Any = None
"""The policy of the job: resolved, or as it was given where only the built model knows its blocks.
`train` puts it in force on the built model. None: there is none, or it is auto."""
_on_cpu = False
OUTSIDE_CONFIGS = (
    "decoder_seq_length",
    "create_attention_mask_in_dataloader",
    "reset_attention_mask",
    "sft",
    "use_tp_pp_dp_mapping",
    "empty_unused_memory_level",
)
"""Arguments that change bytes or times of a step: tensors of a microbatch, the numbering of ranks,
emptying of the allocator's cache. Not every version has all of them."""


def _decorates(original: Function) -> Callable[[Function], Function]:
    """`functools.wraps`, with a mark by which a decorated function is recognised."""

    def mark(wrapper: Function) -> Function:
        setattr(wrapper, _MARK, True)
        return functools.wraps(original)(wrapper)

    return mark


# --- decorators for megatron/training/arguments.py ------------------------------------------------


def with_flags(add_megatron_arguments: Function) -> Function:
    """For `add_megatron_arguments`: the flags of `AutoOptions`.

    `--recompute-policy` itself comes from the field of TransformerConfig.
    """

    @_decorates(add_megatron_arguments)
    def wrapper(parser: ArgumentParser) -> ArgumentParser:
        parser = add_megatron_arguments(parser)
        add_flags(parser, AutoOptions)
        return parser

    return wrapper


def with_check(validate_args: Function) -> Function:
    """For `validate_args`: refuse what cannot work, before a model is built, and claim `auto`."""

    @_decorates(validate_args)
    def wrapper(args: Namespace, *others: Any, **named: Any) -> Any:
        try:
            if args.recompute_policy is not None:
                check_flags(args)
            validated = validate_args(args, *others, **named)
            check(args)
        except AutorecomputeError as error:
            end(error)
        return validated

    return wrapper


def check(args: Namespace) -> None:
    """Check parsed and validated arguments, and claim `auto` for the models built from now on.

    Raises:
        OptionError: an option of auto is impossible, has no effect, or was given without auto; or
            auto was given with settings that it cannot measure.
        MachineError: a run without CUDA was asked for, but not prepared by the launcher.
        PolicyError: the policy does not fit the model, Megatron refuses it, or Megatron's own
            recompute settings were given as well.
    """
    global job_policy
    from megatron.training import arguments

    from megatron_autorecompute.compat import stage_layout
    from megatron_autorecompute.runtime import config_field

    options = from_flags(AutoOptions, args)
    policy, job_policy = args.recompute_policy, None
    refuse_without_auto(options, policy)
    if options.recompute_run_on_cpu and not _on_cpu:
        raise MachineError(
            "--recompute-run-on-cpu was given, but Megatron was started without the launcher that "
            "prepares it: start python -m megatron_autorecompute.pretrain SCRIPT with your flags."
        )
    if policy is None:
        return
    policy = options.field_of(policy)
    args.recompute_policy = "auto" if policy == "auto" else None
    # Megatron builds the same config again for the model; here its rules are checked early.
    model_config = arguments.core_transformer_config_from_args(args)
    stage_layout.note_pattern(model_config, getattr(args, "hybrid_layer_pattern", None))
    if policy != "auto":
        job_policy = _checked(policy, model_config, args)
        return
    refuse_percentile(options, model_config)
    refuse_for_auto(options, model_config)
    config_field.claim_auto(HOLDER)
    atexit.register(_say_nothing_trained)


def _say_nothing_trained() -> None:
    """The last line of a job under auto that ends before its first training step."""
    if os.environ.get("RANK", "0") == "0":
        print("recompute auto: no plan: this job came to no training step")


def _may_have_tower(args: Namespace) -> bool:
    """Whether the script builds a LLaVAModel: pretrain_vlm.py and examples/multimodal."""
    return hasattr(args, "freeze_ViT")


def _encoder_layers(args: Namespace) -> int:
    """Layers of T5's encoder, from a flag that T5's script requires; 0 for other models."""
    is_t5 = args.decoder_seq_length is not None and not _may_have_tower(args)
    return int(args.encoder_num_layers) if is_t5 else 0


def _checked(given: str, model_config: Any, args: Namespace) -> Any:
    """The policy, resolved and checked; as it was given if only the model knows its blocks."""
    from megatron_autorecompute.compat import rules, stage_layout
    from megatron_autorecompute.runtime import config_field

    as_asked = copy.copy(model_config)
    as_asked.recompute_policy = given
    config_field.refuse_contradiction(as_asked)
    said = config_field.without_file(given, model_config)
    encoder_layers = _encoder_layers(args)
    named = set(parts_of_field(said) or ())
    if _may_have_tower(args) or (not encoder_layers and named - {DECODER}):
        return said
    first = ENCODER if encoder_layers else ""
    policy = stage_layout.read_policy(said, model_config, first, encoder_layers)
    rules.check_allowed(model_config, policy)
    return policy


# --- decorators for megatron/training/training.py -------------------------------------------------


def with_tuner(train: Function) -> Function:
    """For `train`: under auto, an `Auto` for the whole training.

    Raises: SystemExit with the reason printed, if no part of this model can run a policy, or the
    policy or plan does not work."""

    @_decorates(train)
    def wrapper(
        forward_step_func: Any, model: Sequence[Any], optimizer: Any, *others: Any, **named: Any
    ) -> Any:
        try:
            with _tuning(model, optimizer):
                return train(forward_step_func, model, optimizer, *others, **named)
        except AutorecomputeError as error:
            end(error)

    return wrapper


@contextmanager
def _tuning(model: Sequence[Any], optimizer: Any) -> Iterator[None]:
    global _auto
    from megatron.training import get_args

    from megatron_autorecompute.runtime import config_field
    from megatron_autorecompute.runtime.apply import apply

    args = get_args()
    _check_all_given(args)
    policy = args.recompute_policy or job_policy
    if policy is None:
        yield
        return
    if policy != "auto":
        if not (_encoder_layers(args) or _may_have_tower(args)):
            config_field.refuse_without_names(_shown(policy), model)
        apply(policy, model, holder=f"--recompute-policy {_shown(policy)!s:.80}")
        yield
        return
    _auto = auto = _attached(model, optimizer, args)
    atexit.unregister(_say_nothing_trained)  # from here on auto itself says how it ends
    try:
        yield
        auto.require_plan()
    finally:
        _auto = None
        auto.close()


def with_step(train_step: Function) -> Function:
    """For `train_step`: auto's context around every step; no effect without auto."""

    @_decorates(train_step)
    def wrapper(*args: Any, **named: Any) -> Any:
        if _auto is None:
            return train_step(*args, **named)
        with _auto.step():
            return train_step(*args, **named)

    return wrapper


def _check_all_given(args: Namespace) -> None:
    """Raise the same error on every rank if their policies differ; otherwise they would hang."""
    from megatron_autorecompute.runtime.ranks import all_gather

    mine = args.recompute_policy or "nothing"
    if job_policy is not None:
        mine = f"policy {hashlib.sha256(str(_shown(job_policy)).encode()).hexdigest()[:12]}"
    said = all_gather(mine)
    if len(set(said)) > 1:
        held = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(said))
        raise ApplyError(
            "The ranks have different values of --recompute-policy and would wait for each other: "
            f"{held}. Start every rank with the same flags, and with files of the same content."
        )


def _shown(policy: Any) -> Any:
    return policy.format() if isinstance(policy, RecomputePolicy) else policy


def _attached(model: Sequence[Any], optimizer: Any, args: Namespace) -> Auto:
    from megatron.training import get_timers, print_rank_0

    from megatron_autorecompute.runtime.attach import attach
    from megatron_autorecompute.runtime.job_facts import Program

    program = Program(
        options=from_flags(AutoOptions, args),
        save=args.save,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        timers=get_timers(),
        shapes=shapes_of(args),
        writers=_writers,
        iteration=lambda: args.curr_iteration,
    )
    return attach(model, optimizer, say=print_rank_0, program=program)


def shapes_of(args: Namespace) -> dict[str, str]:
    """Facts that a plan depends on and only Megatron's arguments have, not its configs."""
    given = {name: getattr(args, name, None) for name in OUTSIDE_CONFIGS}
    return {name: str(value) for name, value in given.items() if value is not None}


def _writers() -> list[Any]:
    """Megatron's TensorBoard writer and W&B module, if this rank has them."""
    from megatron.training import get_tensorboard_writer
    from megatron.training.global_vars import get_wandb_writer

    return [writer for writer in (get_tensorboard_writer(), get_wandb_writer()) if writer]


# --- decorators for megatron/core -----------------------------------------------------------------


def with_policy_rules(post_init: Function) -> Function:
    """For `TransformerConfig.__post_init__`: checks every choice against Megatron's own rules."""
    return _lazily(post_init, "runtime.config_field", "checked_post_init")


def with_policy(init: Function) -> Function:
    """For `__init__` of TransformerBlock, HybridStack and MultiTokenPredictionLayer: run it."""
    return _lazily(init, "runtime.config_field", "applying_init")


def with_runner(checkpointed_forward: Function) -> Function:
    """For `checkpointed_forward` (from 0.18 on): a block under a policy runs its own runner.

    Used by the patch only; without the patch `compat.seam` does the same while a policy is in
    force.
    """
    return _lazily(checkpointed_forward, "compat.seam", "dispatching")


WRAPS_FUNCTIONS = "wraps_functions_of_autorecompute"
"""Attribute of a `checkpoint` with our patch, by which `compat.checkpoints` knows it."""


def with_parts(checkpoint: Function) -> Function:
    """For `tensor_parallel.checkpoint`: what it runs leaves parts out, where a policy says so.

    Used by the patch only; without the patch `compat.checkpoints` does the same while a policy with
    such parts is in force.
    """
    made = _lazily(checkpoint, "compat.checkpoints", "dispatching")
    setattr(made, WRAPS_FUNCTIONS, True)
    return made


def _lazily(original: Function, module: str, around: str) -> Function:
    """`<module>.<around>(original)`, made at the first call: these modules import Megatron."""
    made: Function | None = None

    @_decorates(original)
    def wrapper(*args: Any, **named: Any) -> Any:
        nonlocal made
        if made is None:
            ours = importlib.import_module(f"megatron_autorecompute.{module}")
            made = getattr(ours, around)(original)
        return made(*args, **named)

    return wrapper


# --- at run time ----------------------------------------------------------------------------------


def install() -> None:
    """Decorate an untouched Megatron-LM; no effect if it is already patched or decorated.

    Raises:
        MachineError: there is no `megatron.training` on sys.path.
        UnsupportedVersionError: this version of megatron-core is not supported.
    """
    _require_training()
    from megatron.training import arguments, training

    if hasattr(training.train, _MARK):
        return
    from megatron_autorecompute.runtime import config_field

    config_field.install()
    _decorate(arguments.add_megatron_arguments, with_flags)
    _decorate(arguments.validate_args, with_check)
    _decorate(training.train, with_tuner)
    _decorate(training.train_step, with_step)


def prepare_cpu() -> None:
    """Prepare a run on CPU, for `--recompute-run-on-cpu`; call it before `install`.

    Raises: MachineError if CUDA is available, or there is no `megatron.training` on sys.path."""
    global _on_cpu
    _require_training()
    from megatron_autorecompute.meta import without_cuda

    without_cuda.activate(training=True)
    _skip_fused_kernels()
    _keep_sent_outputs()
    _on_cpu = True


def leave_together() -> None:
    """Destroy the process group at the end of a run on CPU; no effect without `prepare_cpu`.

    Symptom: an occasional SIGABRT after "training is done": a rank that has ended closes
    connections on which gloo's threads in other ranks still wait. Upstream: no script of
    Megatron-LM destroys the process group. Remove when they do.
    """
    import torch

    if _on_cpu and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _skip_fused_kernels() -> None:
    """Symptom: "unsupported operand type(s) for +: 'NoneType' and 'str'" in the search for nvcc.

    Upstream: `_compile_dependencies` of megatron/training/initialize.py compiles
    megatron/legacy/fused_kernels through 0.16. Remove when 0.16 is dropped.
    """
    from megatron_autorecompute.compat import versions

    kernels = versions.fused_kernels()
    if kernels is not None:
        vars(kernels)["load"] = lambda args: None


def _keep_sent_outputs() -> None:
    """Symptom: with several chunks per stage gradients differ from run to run on gloo, or are NaN.

    Upstream: the schedule of 0.16 and 0.17 frees an output that gloo is still sending, and
    `core_transformer_config_from_args` cannot set `deallocate_pipeline_outputs=False`. Remove when
    0.17 is dropped.
    """
    from megatron.training import arguments

    from megatron_autorecompute.compat import versions

    def keeping(config_from_args: Function) -> Function:
        def wrapper(*args: Any, **named: Any) -> Any:
            config = config_from_args(*args, **named)
            config.deallocate_pipeline_outputs = False
            return config

        return wrapper

    if versions.frees_outputs_being_sent():
        _decorate(arguments.core_transformer_config_from_args, keeping)


def _require_training() -> None:
    try:
        found = importlib.util.find_spec("megatron.training")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MachineError(
            "There is no megatron.training on sys.path; a Megatron-LM checkout has it beside "
            "pretrain_gpt.py. Give the path of a script in a checkout, or set PYTHONPATH to one."
        )


def _decorate(original: Function, decorator: Callable[[Function], Function]) -> None:
    """Replace the original by the decorated function in every module that imported it by name."""
    decorated, name = decorator(original), original.__name__
    # Entries need not be modules: packages put objects of their own there.
    for imported, module in list(sys.modules.items()):
        if imported.startswith("megatron.") and vars(module).get(name) is original:
            setattr(module, name, decorated)


def end(error: AutorecomputeError) -> NoReturn:
    """Print the error once and exit with its code.

    Most errors are raised on all ranks: rank 0 prints it, the others only if they outlive rank 0.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(RANK_0_SPEAKS_S)
    print(f"megatron-autorecompute: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code) from error
