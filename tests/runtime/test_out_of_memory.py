"""A step in which one rank runs out of memory: lost without a trace, or the end of the job at once.

Ranks are real processes with gloo. A lost step is held against a run of the same data that never
makes this step: weights, gradients to come, optimizer state and buffers are equal bit by bit. A
collective that one rank enters once more or less than another ends in a wait, or in other bits.
"""

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_autorecompute.patched import patched
from megatron_autorecompute.runtime.oom_guard import FAILED, FINE
from testing.ranks import RankError, run_ranks
from tests.support import forward_step, microbatch, start_parallel, tiny_config, tiny_gpt

STEPS, LOST = 5, 2


@dataclass(frozen=True)
class Failure:
    """Where a rank runs out of memory, in the step that is lost."""

    rank: int
    where: str
    """forward, backward, or again: where a layer runs again with gradients."""
    microbatch: int
    layer: int
    """Of the rank's last chunk; a backward fails behind this layer's."""


def nothing(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    name: str
    failure: Failure
    kind: str = "dense"
    sizes: dict[str, int] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 3
    lengths: tuple[int, ...] = (32,)
    """Of the sequences, one microbatch after the other."""
    aligned: bool = False
    """Whether the schedule says when gradients are reduced and parameters gathered."""
    lost: int = LOST
    changed: Callable[[Any], None] = nothing
    """What is done to a model before it is wrapped."""
    before: Callable[["Job"], None] = nothing
    """What the job does besides, before every step."""
    after: Callable[["Job"], None] = nothing


class Job:
    """A small model under Megatron's DistributedDataParallel and optimizer."""

    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.case, self.step_number, self.armed = case, 0, False
        self.config = tiny_config(case.kind, dropout=0.0, **{**case.sizes, **case.config})
        ddp = DistributedDataParallelConfig(
            bucket_size=20_000, align_param_gather=case.aligned, **case.ddp
        )
        models = tiny_gpt(self.config)
        for model in models:
            case.changed(model)
        self.chunks = [DistributedDataParallel(self.config, ddp, model) for model in models]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                use_distributed_optimizer=ddp.use_distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            self.chunks,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if case.aligned:
            starts = [[c.start_grad_sync, c.start_param_sync] for c in self.chunks]
            reduces, gathers = map(list, zip(*starts, strict=True))
            several = len(self.chunks) > 1
            self.config.grad_sync_func = reduces if several else reduces[0]
            self.config.param_sync_func = gathers if several else gathers[0]
        self.data_rank = parallel_state.get_data_parallel_rank()
        if torch.distributed.get_rank() == case.failure.rank:
            self._break(case.failure)

    def _break(self, failure: Failure) -> None:
        layer = self.chunks[-1].module.decoder.layers[failure.layer]
        original, passes, fail = layer.forward, itertools.count(), self._fail

        def forward(*args: Any, **named: Any) -> Any:
            if failure.where == "again" and not torch.is_grad_enabled():
                return original(*args, **named)
            due = next(passes) % self.case.microbatches == failure.microbatch
            if due and failure.where in ("forward", "again"):
                fail()
            output = original(*args, **named)
            if due and failure.where == "backward":
                output[0].register_hook(fail)
            return output

        layer.forward = forward

    def _fail(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise torch.OutOfMemoryError("simulated")

    def _forward_step(self, iterator: Any, model: Any) -> Any:
        failure = self.case.failure
        if failure.where == "data" and torch.distributed.get_rank() == failure.rank:
            self._fail()
        return (per_token if self.config.calculate_per_token_loss else forward_step)(
            iterator, model
        )

    def step(self) -> bool:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.case.before(self)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        lengths = itertools.cycle(self.case.lengths)
        first = 100 * self.step_number + self.data_rank
        batches = [
            microbatch(first + 10 * number, seq_length=next(lengths))
            for number in range(self.case.microbatches)
        ]
        self.step_number += 1
        several = len(self.chunks) > 1
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if several else iter(batches),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=self.case.microbatches,
            seq_length=32,
            micro_batch_size=2,
            forward_only=False,
        )
        taken = self.optimizer.step()[0]
        self.case.after(self)
        return taken

    def state(self) -> str:
        """A digest of weights, optimizer state and buffers."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        tensors = [
            t
            for chunk in self.chunks
            for t in (*chunk.module.parameters(), *chunk.module.buffers())
        ]
        tensors += _tensors(self.optimizer.state_dict())
        data = b"".join(tensor.detach().double().numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(data).hexdigest()


def per_token(iterator, model):
    """Megatron's forward_step_func with --calculate-per-token-loss."""

    def loss_function(losses):
        loss, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return loss, tokens, {"loss": torch.stack((loss.detach(), tokens))}

    return model(**next(iterator)), loss_function


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [t for part in state for t in _tensors(part)] if isinstance(state, list) else []


def survived(cases):
    """(outcomes, steps taken, state, state of the run without the lost step) of each."""
    from megatron_autorecompute.runtime.oom_guard import StepGuard

    start_parallel(**cases[0].sizes)
    found: list[Any] = []
    states: dict[str, str] = {}  # without the lost step, by all of a case but where it fails
    for case in cases:
        job = Job(case)
        guard = StepGuard(job.chunks, job.optimizer, lambda: False)
        outcomes, taken = [], []
        for step in range(STEPS):
            job.armed = step == case.lost
            with guard.step():
                taken.append(job.step())
            outcomes.append(guard.outcome)
        alike = repr(replace(case, name="", failure=cases[0].failure))
        if alike not in states:
            without = Job(case)
            for step in range(STEPS):
                if step == case.lost:
                    without.step_number += 1
                else:
                    without.step()
            states[alike] = without.state()
        found.append((outcomes, taken, job.state(), states[alike]))
    return found


def check_survived(cases, world_size, **options):
    ranks = run_ranks(survived, world_size, cases, timeout_s=60 + 10 * len(cases), **options)
    for number, case in enumerate(cases):
        for outcomes, taken, state, without in (found[number] for found in ranks):
            assert outcomes == [FAILED if s == case.lost else FINE for s in range(STEPS)], case.name
            assert taken == [s != case.lost for s in range(STEPS)], case.name
            assert state == without, case.name


OVERLAPS = {
    "nothing overlapped": {},
    "gradients": {"overlap_grad_reduce": True},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "gradients, distributed optimizer": {
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
    },
    "gradients and parameters, distributed optimizer": {
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
    },
}
PLACES = [
    Failure(rank=1, where="forward", microbatch=0, layer=-1),
    Failure(rank=0, where="forward", microbatch=2, layer=0),
    Failure(rank=0, where="backward", microbatch=0, layer=0),
    Failure(rank=1, where="backward", microbatch=2, layer=-1),
]
LAST_BACKWARD = PLACES[-1]


@pytest.mark.any_version
def test_a_lost_step_between_data_parallel_ranks_leaves_no_trace():
    check_survived(
        [
            Case(f"{name}, {place}", place, ddp=ddp)
            for (name, ddp), place in itertools.product(OVERLAPS.items(), PLACES)
        ],
        2,
    )


@pytest.mark.any_version
@pytest.mark.parametrize("chunks", [None, 2])
def test_a_lost_step_between_pipeline_stages_leaves_no_trace(chunks):
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": chunks}
    places = [replace(place, layer=0, microbatch=place.microbatch % 2) for place in PLACES]
    cases = [Case(str(place), place, sizes=sizes, microbatches=4) for place in places]
    if chunks is None:
        varied = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
        cases += [replace(case, config=varied, lengths=(32, 16, 24)) for case in cases]
    check_survived(cases, 2)


@pytest.mark.any_version
def test_a_recompute_begun_in_a_wait_leaves_no_trace_either():
    sizes = {"pipeline_model_parallel_size": 2}
    places = [Failure(0, "again", microbatch, layer=0) for microbatch in (0, 3)]
    cases = [
        Case(str(at), at, sizes=sizes, microbatches=4, changed=recomputing_ahead) for at in places
    ]
    check_survived(cases, 2)


def recomputing_ahead(model):
    from megatron_autorecompute.runtime.apply import apply

    apply("full+ahead", model)


TWO_PIPELINES = [
    Case(
        f"aligned {aligned}, {place}",
        replace(place, layer=0),
        sizes={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        ddp=OVERLAPS["gradients and parameters, distributed optimizer"],
        microbatches=4,
        aligned=aligned,
    )
    for place, aligned in zip(PLACES, (False, True, False, True), strict=True)
]


@pytest.mark.any_version
def test_a_lost_step_in_two_pipelines_leaves_no_trace():
    check_survived(TWO_PIPELINES, 4)


def left_unwaited(case, lost):
    """What this rank posts in step LOST and nobody has waited for at its end, by name."""
    from megatron_autorecompute.runtime.oom_guard import StepGuard

    start_parallel(**case.sizes)
    job = Job(case)
    guard = StepGuard(job.chunks, job.optimizer, lambda: False)
    for step in range(LOST + 1):
        with requests() as unwaited, guard.step():
            job.armed = lost and step == LOST
            job.step()
    assert guard.outcome == (FAILED if lost else FINE)
    return sorted(unwaited.values())


@contextlib.contextmanager
def requests():
    """Yields the names of the methods of process groups that were called in this block and whose
    work nobody has waited for, by number."""
    group, work = torch.distributed.ProcessGroup, torch.distributed.Work
    names = ("send", "recv", "reduce", "gather", "scatter")
    unwaited: dict[int, str] = {}
    numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    count = itertools.count()

    def noted(name, usual):
        def method(*args, **kwargs):
            posted = usual(*args, **kwargs)
            if isinstance(posted, work):
                numbers[posted] = next(count)
                unwaited[numbers[posted]] = name
            return posted

        return method

    def wait(self, *args, usual=work.wait):
        unwaited.pop(numbers.get(self), None)
        return usual(self, *args)

    with contextlib.ExitStack() as stack:
        for name, usual in vars(group).items():
            if any(part in name for part in names):
                stack.enter_context(patched(group, name, noted(name, usual)))
        stack.enter_context(patched(work, "wait", wait))
        yield unwaited


@pytest.mark.any_version
def test_a_lost_step_leaves_no_request_open_that_a_complete_one_waits_for():
    case = replace(TWO_PIPELINES[3], aligned=False)
    lost, complete = (run_ranks(left_unwaited, 4, case, lost) for lost in (True, False))
    assert lost == complete
    # The interleaved schedule's last activations: their gradients show that they arrived.
    assert {name for names in complete for name in names} == {"send"}


def embedding_listed_last(model):
    model._modules["embedding"] = model._modules.pop("embedding")


@pytest.mark.any_version
def test_gradients_are_reduced_in_the_order_in_which_the_model_runs_and_not_is_listed():
    ddp = OVERLAPS["gradients and parameters, distributed optimizer"]
    places = [replace(place, microbatch=2) for place in PLACES]
    changed = embedding_listed_last
    # Step 1: the step before it, Megatron's first, has reduced in the order of the list.
    check_survived([Case(str(at), at, ddp=ddp, changed=changed, lost=1) for at in places], 2)


EXPERT_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
}


@pytest.mark.any_version
def test_a_lost_step_moves_no_expert_bias_and_no_running_statistics():
    ddp = OVERLAPS["gradients"]
    check_survived(
        [
            Case(f"bias, {PLACES[0]}", PLACES[0], "moe", ddp=ddp, config=EXPERT_BIAS),
            Case(f"bias, {PLACES[3]}", PLACES[3], "moe", ddp=ddp, config=EXPERT_BIAS),
            Case("statistics", PLACES[3], ddp=ddp, changed=with_statistics),
        ],
        2,
    )


def with_statistics(model):
    """Adds a running mean that every forward moves, as BatchNorm does."""

    def move(model, _, losses):
        model.mean.lerp_(losses.detach().mean(), 0.1)

    model.register_buffer("mean", torch.zeros(()))
    model.register_forward_hook(move)


@pytest.mark.any_version
def test_what_megatron_does_around_a_lost_step_goes_on():
    ddp = OVERLAPS["gradients, distributed optimizer"]
    mtp = {"mtp_num_layers": 1}
    check_survived(
        [
            Case("timers", LAST_BACKWARD, ddp=ddp, before=with_timers),
            Case("lengths", PLACES[0], ddp=ddp, lengths=(32, 16, 24)),
            Case("loss per token", PLACES[0], ddp=ddp, config={"calculate_per_token_loss": True}),
            Case("multi-token prediction", PLACES[0], ddp=ddp, config=mtp, after=log_mtp),
        ],
        2,
    )


def with_timers(job):
    """--timing-log-level 2"""
    from megatron.core.timers import Timers

    job.config.timers = job.config.timers or Timers(2, "minmax")


def log_mtp(job):
    """--log-interval 1"""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.track_mtp_metrics(1.0, job.step_number, None)


@pytest.mark.any_version
@pytest.mark.parametrize("size", [1, 4])
def test_an_evaluation_of_another_size_leaves_no_shape_behind(size):
    sizes = {"pipeline_model_parallel_size": 2}
    place = Failure(rank=0, where="forward", microbatch=0, layer=0)
    check_survived([Case(str(size), place, sizes=sizes, before=partial(evaluate, size=size))], 2)


def evaluate(job, size):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([microbatch(7, micro_batch_size=size)]),
            model=job.chunks[0].eval(),
            num_microbatches=1,
            seq_length=32,
            micro_batch_size=size,
            forward_only=True,
        )
    job.chunks[0].train()


def ended(case, path):
    """A job that runs out of memory where no rank can be spared; leaves the reason behind."""
    from megatron_autorecompute.runtime.oom_guard import StepGuard

    start_parallel(**case.sizes)
    job = Job(case)
    guard = StepGuard(job.chunks, job.optimizer, lambda: False, path.write_text)
    for step in range(STEPS):
        job.armed = step == case.lost
        with guard.step():
            job.step()


MET = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}
INSIDE = Failure(rank=1, where="forward", microbatch=1, layer=1)


def gathers_from_the_second_step_on(job):
    """As Megatron's training loop does."""
    for chunk in job.chunks:
        if job.step_number == 0:
            chunk.disable_forward_pre_hook(param_sync=False)
        elif job.step_number == 1:
            chunk.enable_forward_pre_hook()


GATHERS = Case(
    "in which order parameters are gathered",
    replace(INSIDE, microbatch=0),
    ddp=OVERLAPS["gradients and parameters, distributed optimizer"],
    before=gathers_from_the_second_step_on,
    lost=1,
)


@pytest.mark.any_version
@pytest.mark.parametrize(
    "case",
    [
        Case("expert parallel", INSIDE, "moe", sizes={"expert_tensor_parallel_size": 2}),
        Case("global_aux_loss", INSIDE, "moe", config=MET),
        Case("first step", INSIDE, lost=0),
        GATHERS,
        Case("outside forward and backward", replace(INSIDE, where="data")),
    ],
    ids=lambda case: case.name,
)
def test_where_no_rank_can_be_spared_the_job_ends_at_once(case, tmp_path):
    left = tmp_path / "left"
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*OutOfMemoryError: simulated"):
        run_ranks(ended, 2, case, left, timeout_s=60)
    assert case.name in left.read_text()
