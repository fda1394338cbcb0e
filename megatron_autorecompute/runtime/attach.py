"""`attach`: `auto` in any training loop that calls Megatron-Core's schedule itself.

    auto = attach(model_chunks, optimizer, max_tokens=16384, plan_path="plan.json")
    forward_backward = auto.schedule(get_forward_backward_func())

`integrations` attaches to Megatron-LM and Bridge in the same way. Nothing of `megatron.training` is
needed. The unit is one training call of the schedule: nothing is in flight between two calls, so
each may run a policy of its own, and what a loop does in between (generation, log-prob passes,
moving states to the host) is outside.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_autorecompute.compat import model_layers, parallel, rules
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.megatron_fields import NO_RECOMPUTE
from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.runtime.apply import HOLDER_KEY
from megatron_autorecompute.runtime.auto_options import AHEAD_CHOICES, AutoOptions
from megatron_autorecompute.runtime.calls import Calls
from megatron_autorecompute.runtime.controller import Auto
from megatron_autorecompute.runtime.job_facts import FixedCalls, JobFacts, Program, Reporting
from megatron_autorecompute.runtime.ranks import all_gather, is_first_rank


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    *,
    max_tokens: int | None = None,
    budget_gib: float | None = None,
    reserve_gib: float | None = None,
    plan_path: str | None = None,
    replace_recompute: bool = False,
    recompute_choices: str = AHEAD_CHOICES,
    allow_offload: FixedCalls | None = None,
    say: Callable[[str], None] = print,
    program: Program | None = None,
) -> Auto:
    """Make a built model choose by itself what each layer recomputes; call it on every rank.

    Args:
        model_chunks: this rank's model chunks, wrapped (DDP, Float16Module) or bare; one, a list,
            or a ModuleList.
        optimizer: Megatron's optimizer on them, or None.
        max_tokens: the most tokens that the model gets in one microbatch on a rank, after padding
            and after context parallelism has split the samples. The same on all ranks.
        budget_gib: GiB that torch may allocate on every device. Without it: what the device has
            free in the first training call, less the reserve.
        reserve_gib: GiB kept free for fragmentation if no budget is given; by default measured.
        plan_path: file to which rank 0 writes the plan, and from which it reads the plan at a
            restart. Given on all ranks or none.
        replace_recompute: whether recompute that the model's config sets is replaced until
            `close`. If False, such a config is refused.
        recompute_choices: "megatron" measures and plans only what Megatron's own checkpoints can
            run; "all" also what they lack; "ahead" also recompute that begins early.
        allow_offload: what every training call has, in a loop whose calls are all alike. Then
            Megatron's fine-grained activation offloading is also measured and planned, and a step
            is the whole training step with its update: put `with auto.step():` around it.
        say: prints a text; called on rank 0.
        program: facts and options of a program whose microbatches have one length. Its options
            replace the arguments of the same meaning, and a step is the whole training step.

    Raises:
        OptionError: an argument is impossible, the config sets recompute of its own, or ranks were
            given different max_tokens. If one rank has the error, all ranks raise it.
        AutorecomputeError: as `Auto`.
    """
    unit = _Unit(get_num_microbatches)
    with _on_all_ranks(max_tokens, plan_path, allow_offload):
        chunks = _chunks(model_chunks)
        config = model_layers.unwrapped(chunks[0]).config
        if program is None:
            options = _Arguments(
                recompute_memory_budget_gib=budget_gib,
                recompute_memory_reserve_gib=reserve_gib,
                recompute_plan_path=plan_path,
                recompute_choices=recompute_choices,
                recompute_allow_offload=allow_offload is not None,
            )
            unit = _unit(allow_offload, max_tokens, _fewest_microbatches(config, len(chunks)))
            program = Program(
                options=options, micro_batch_size=unit.samples, seq_length=unit.tokens
            )
        if not callable(say):
            raise OptionError(f"say={say!r}: give a function that takes a text, such as print.")
        if not replace_recompute:
            _refuse(chunks)
    put_back = _replaced(chunks) if replace_recompute else lambda: None
    job = JobFacts(
        parallelism=_parallelism(config, program),
        num_microbatches=unit.num_microbatches,
        say=lambda text: say(text) if is_first_rank() else None,
        **{each.name: getattr(program, each.name) for each in fields(Reporting)},
        without_cuda=not torch.cuda.is_available(),
        calls=unit.calls,
        on_close=put_back,
    )
    try:
        if program.save is not None:
            os.makedirs(program.save, exist_ok=True)  # the plan comes before the first checkpoint
        return Auto(chunks, optimizer, program.options.with_plan_in(program.save), job)
    except BaseException:
        put_back()
        raise


class _Arguments(AutoOptions):
    """Options that were given to `attach`, by the names that they have there."""

    __slots__ = ()
    BUDGET = "budget_gib"
    RESERVE = "reserve_gib"
    PATH = "plan_path"
    CHOICES = "recompute_choices"


def _chunks(given: Any) -> list[torch.nn.Module]:
    """The model chunks, of what was given as them.

    Raises: OptionError if these are no chunks of a Megatron model."""
    alone = isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleList)
    chunks: list[Any] = [given] if alone else list(given) if isinstance(given, Iterable) else []
    for chunk in chunks or [given]:
        inside = model_layers.unwrapped(chunk) if isinstance(chunk, torch.nn.Module) else None
        if not hasattr(getattr(inside, "config", None), "recompute_granularity"):
            raise OptionError(
                f"model_chunks has {type(chunk).__name__} where attach() needs a model of "
                "Megatron-Core, such as GPTModel, wrapped or bare: give this rank's chunks, as the "
                "schedule gets them."
            )
    return chunks


class _Unit(NamedTuple):
    """What a training call has."""

    num_microbatches: Callable[[], int]
    calls: Calls | None = None
    """Where calls differ. Then a layer's costs are lines in tokens: those of one long sample."""
    samples: int = 1
    tokens: int = 1


def _unit(alike: FixedCalls | None, max_tokens: int | None, fewest_microbatches: int) -> _Unit:
    if alike is None:
        calls = Calls(max_tokens, 2 * fewest_microbatches)
        return _Unit(calls.num_microbatches, calls)
    if not isinstance(alike, FixedCalls):
        raise OptionError(
            f"allow_offload={alike!r:.80}: say what every training call has, as "
            "FixedCalls(num_microbatches=8, micro_batch_size=1, seq_length=8192), or leave it out."
        )
    if max_tokens is not None:
        raise OptionError(
            "attach() was given max_tokens, for calls that differ, and allow_offload, for calls "
            "that are all alike. Leave one of them out."
        )
    microbatches = functools.partial(int, alike.num_microbatches)
    return _Unit(microbatches, None, alike.micro_batch_size, alike.seq_length)


@contextmanager
def _on_all_ranks(max_tokens: Any, plan_path: Any, allow_offload: Any) -> Iterator[None]:
    """Surrounds what each rank checks by itself. An error on one is raised on all, which would
    otherwise wait for that rank; so is one if their arguments do not go together."""
    error = None
    try:
        yield
    except OptionError as found:
        error = found
    offload = "" if allow_offload is None else f", allow_offload={allow_offload!r}"
    path = "no" if plan_path is None else "a"
    given = f"max_tokens={max_tokens!r} and {path} plan_path{offload}"
    ranks = all_gather((error and str(error), given))
    if error is not None:
        raise error
    _, first = ranks[0]
    for rank, (wrong, given) in enumerate(ranks):
        if wrong:
            raise OptionError(f"attach() on rank {rank}: {wrong}")
        if given != first:
            raise OptionError(
                f"Ranks were given other arguments of attach(): rank 0 {first}, rank {rank} "
                f"{given}. Give all of them the same max_tokens, and a path or none."
            )


def _parallelism(config: Any, program: Program) -> Parallelism:
    """The shapes that bytes and times hold for."""
    tensor_parallel = config.tensor_model_parallel_size
    return Parallelism(
        micro_batch_size=program.micro_batch_size,
        seq_length=program.seq_length,
        tensor_parallel=tensor_parallel,
        context_parallel=config.context_parallel_size,
        expert_parallel=config.expert_model_parallel_size,
        expert_tensor_parallel=config.expert_tensor_parallel_size or tensor_parallel,
        sequence_parallel=config.sequence_parallel,
        dtype=str(config.params_dtype).removeprefix("torch."),
    )


def _fewest_microbatches(config: Any, num_chunks: int) -> int:
    """Microbatches that fill the pipeline."""
    stages = parallel.pipeline_size()
    group = config.microbatch_group_size_per_vp_stage if num_chunks > 1 else None
    return max(stages, group or 0)


# --- recompute that a config sets -----------------------------------------------------------------


_OWN = {**NO_RECOMPUTE, "moe_layer_recompute": False}


def _configs(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Every config of the model that can set recompute, once; not one that a policy stands in."""
    seen = set()
    for chunk in chunks:
        for module in chunk.modules():
            config = getattr(module, "config", None)
            if (
                hasattr(config, "recompute_granularity")
                and HOLDER_KEY not in vars(module)
                and id(config) not in seen
            ):
                seen.add(id(config))
                yield config


def _refuse(chunks: Sequence[torch.nn.Module]) -> None:
    for config in _configs(chunks):
        own = rules.own_recompute(config)
        if own is None:
            continue
        lines = ", ".join(
            f"{name}={value!r}" for name in _OWN if (value := getattr(config, name, None))
        )
        raise OptionError(
            f"The model's config sets recompute of its own ({own}). Remove {lines} from it, or "
            "give attach(..., replace_recompute=True) to replace it until close()."
        )


def _replaced(chunks: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Take recompute out of the configs; returns what puts it back."""
    before = []
    for config in _configs(chunks):
        for name, nothing in _OWN.items():
            if hasattr(config, name):
                before.append((config, name, getattr(config, name)))
                setattr(config, name, nothing)

    def put_back() -> None:
        for config, name, value in before:
            setattr(config, name, value)

    return put_back
