"""Runs a whole step of one pipeline stage by Megatron's own schedule, and counts its bytes exactly.

The real model is built on meta tensors under torch's "fake" process group of the real world size.
It does not show times, temporaries inside kernels, the allocator's blocks, or MoE imbalance: tokens
are routed evenly. Gradients count as already allocated.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_iter

from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.interrupts import end_with_parent, interrupts_held
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.patched import patched
from megatron_autorecompute.runtime.live_bytes import LiveBytes, storage_bytes

MOST_WORKERS = 8
"""Processes that run stages at the same time; each needs about half a GiB of memory."""

Result = TypeVar("Result")
Build = Callable[[Any, bool, bool, int | None, "StepShape"], torch.nn.Module]
"""(config, pre_process, post_process, vp_stage, shape) -> one chunk, on the default device."""

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any]]]
"""Megatron's `forward_step_func`; its iterator yields microbatch numbers."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """One stage's step."""

    parameter_bytes: int
    buffer_bytes: int
    """Module buffers, the attention mask, and the tensors of `kept_between_steps`."""
    peak_bytes: int
    """The most bytes of activations: all that is not static."""


# ----------------------------------------------------------------------------- stages, on meta


def workers(num_stages: int) -> int:
    """Processes for so many stages: one for each core, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(num_stages, cores or 1, MOST_WORKERS))


def in_processes(
    run: Callable[[int], Result],
    stages: Sequence[int],
    max_workers: int = 1,
    done: Callable[[Result], None] = lambda _: None,
) -> tuple[Result, ...]:
    """Call `run`, which must be picklable, for every stage in processes that never see CUDA.

    An interrupt ends these processes; it reaches only this one, wherever they are. So does what
    ends this one.

    Raises MachineError if one of them dies.
    """
    with in_processes_beside(run, stages, max_workers) as futures:
        for future in futures:
            done(future.result())
        return tuple(future.result() for future in futures)


@contextlib.contextmanager
def in_processes_beside(
    run: Callable[[int], Result], stages: Sequence[int], max_workers: int = 1
) -> Iterator[list[Future[Result]]]:
    """Like `in_processes`, while this process goes on; the block ends when all have ended."""
    pool = ProcessPoolExecutor(
        max_workers, multiprocessing.get_context("spawn"), initializer=_start_process
    )
    before = multiprocessing.active_children()
    with pool:
        try:
            with interrupts_held():
                futures = [pool.submit(run, stage) for stage in stages]
            yield futures
        except BrokenProcessPool as error:
            raise MachineError(
                "A process that ran a stage on meta tensors was ended from outside, perhaps for "
                "want of memory. Try again on a machine with more."
            ) from error
        except BaseException:  # an interrupt, or the error of one stage
            for process in set(multiprocessing.active_children()) - set(before):
                process.kill()
            raise


def _start_process() -> None:
    end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # It may not load without CUDA; stand-ins take its place.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    # Since 0.19 GPTModel logs once per process that it is deprecated.
    logging.getLogger("megatron").setLevel(logging.ERROR)


def meta_config(config: Any) -> Any:
    """A copy without weight initialisation, CUDA-only fusions and callbacks of a running job."""
    changed = copy.copy(config)
    changed.perform_initialization = False
    changed.use_cpu_initialization = False
    changed.gradient_accumulation_fusion = False
    changed.masked_softmax_fusion = changed.persist_layer_norm = False
    changed.batch_p2p_comm = False  # same tensors; the fake process group has no coalescing
    for callback in (
        *("timers", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        "finalize_model_grads_func",
    ):
        setattr(changed, callback, None)
    return changed


# --------------------------------------------------------------------------- model, any device


def build_chunks(
    config: Any, shape: StepShape, build: Build, device: torch.device
) -> list[torch.nn.Module]:
    """This rank's model chunks in training mode and in params_dtype.

    Position embeddings are built in fp32 and then cast, as by Float16Module.
    """
    from megatron.core import parallel_state

    count = config.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in range(count) if count else [None]:
        where = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        first = parallel_state.is_pipeline_first_stage(**where)
        last = parallel_state.is_pipeline_last_stage(**where)
        with device:
            chunk = build(config, first, last, vp_stage, shape)
        chunks.append(chunk.to(config.params_dtype).train())
    return chunks


def build_gpt(
    config: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    shape: StepShape,
    *,
    use_transformer_engine: bool = False,
    **ends: Any,
) -> torch.nn.Module:
    """A GPTModel; MoE, MLA, MTP by the config.

    Its layers are Megatron's local ones (unfused attention), or those "with Transformer Engine",
    which are stand-ins inside `kernels.stand_ins`. `ends` are arguments of GPTModel.

    With unfused RoPE a layer holds 4 sbh / tp bytes more in 16 bit than with learned positions: the
    rotated q and k, beside the qkv tensor of which v is a view.
    """
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    engine = {"use_transformer_engine": use_transformer_engine}
    if config.experimental_attention_variant is None:
        layers = functools.partial(gpt_layer_specs.get_gpt_decoder_layer_specs, **engine)
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, **engine, vp_stage=vp_stage)
    else:  # Gated DeltaNet in some layers, or sparse attention
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

        layers = specs.get_transformer_layer_with_experimental_attention_variant_spec
        block = specs.get_transformer_block_with_experimental_attention_variant_spec
        spec = block(config, vp_stage=vp_stage)
    if config.mtp_num_layers:
        # The depths are like the model's last layer, which may be on an earlier stage.
        ends["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layers(config)[-1], **engine, vp_stage=vp_stage
        )
    return GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        **{"position_embedding_type": "rope", **ends},
    )


# ------------------------------------------------------------------------- one step, any device


def trace_step(
    models: list[torch.nn.Module],
    shape: StepShape,
    forward_step: ForwardStep,
    watched: Callable[[LiveBytes], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> StageStep:
    """Run one step of Megatron's schedule on built chunks, inside `watched`, and count bytes alive.
    If the chunks offload, a step goes before it: the warm-up of Megatron's offload.

    Needs Megatron's parallel state. Works on CPU tensors in real ranks as well; the tests compare
    the two. Gradients are allocated first, as static bytes, except for parameters with a main_grad.
    Tensors in the `static` of `forward_step` stay from step to step.
    """
    parameters = [p for model in models for p in model.parameters()]
    gradients = [g for p in parameters if (g := _gradient(p)) is not None]
    buffers = [b for model in models for b in model.buffers()]
    buffers += getattr(forward_step, "static", ())
    config: Any = models[0].config
    if getattr(config, "fine_grained_activation_offloading", False):
        run_step(models, shape, forward_step)
    with (
        LiveBytes(static=[*parameters, *gradients, *buffers]) as live,
        kept_between_steps(models, live) as kept,
        watched(live),
    ):
        run_step(models, shape, forward_step)
    return StageStep(
        parameter_bytes=storage_bytes(parameters),
        buffer_bytes=storage_bytes([*buffers, *kept]),
        peak_bytes=live.peak_bytes,
    )


def run_step(
    models: list[torch.nn.Module],
    shape: StepShape,
    forward_step: ForwardStep,
    *,
    forward_only: bool = False,
) -> None:
    """One step of Megatron's schedule on built chunks; needs its parallel state."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    several = len(models) > 1
    numbers = [iter(range(shape.num_microbatches)) for _ in models]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=numbers if several else numbers[0],
        model=models if several else models[0],
        num_microbatches=shape.num_microbatches,
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
        forward_only=forward_only,
    )
    from megatron_autorecompute.compat import model_layers

    for model in models:  # as the drain of deferred gradients does, which needs real groups
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            (getattr(model_layers.unwrapped(model), name, None) or []).clear()


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The tensor that accumulates the parameter's gradient; allocated if there is none yet."""
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return parameter.grad


@contextlib.contextmanager
def kept_between_steps(
    models: Sequence[torch.nn.Module], live: LiveBytes
) -> Iterator[list[torch.Tensor]]:
    """Exclude from `live` what Megatron keeps between steps; yields a list that fills with it.

    Unfused attention's score buffer and the gather buffer of sequence parallelism
    (GlobalMemoryBuffer), and rotary frequencies, cached per chunk for every sequence length.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.utils import GlobalMemoryBuffer

    found: list[torch.Tensor] = []

    def keep(result: Any) -> Any:
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                live.exclude(tensor)
                found.append(tensor)
        return result

    rotary = [m for model in models for m in model.modules() if isinstance(m, RotaryEmbedding)]
    hooks = [m.register_forward_hook(lambda _, __, result: keep(result)) for m in rotary]
    try:
        with patched(GlobalMemoryBuffer, "get_tensor", _kept(GlobalMemoryBuffer.get_tensor, live)):
            yield found
        found += parallel_state.get_global_memory_buffer().buffer.values()
    finally:
        for hook in hooks:
            hook.remove()


def _kept(get_tensor: Callable[..., Any], live: LiveBytes) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = get_tensor(self, *args, **kwargs)
        live.exclude(tensor)
        return tensor

    return wrapper
