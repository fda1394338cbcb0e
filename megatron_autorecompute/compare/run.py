"""Runs the comparison: Megatron's own strategies and ours, in turns, on one job under one budget.

The parent starts one process per rank and saves every result as it arrives, so that nothing
finished is lost. All ranks do the same; they agree on figures before these decide anything.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_autorecompute.compare.comparison import (
    ON_A_GPU,
    Comparison,
    Family,
    NotTried,
    Shape,
    StrategyResult,
    needless,
    read_text,
)
from megatron_autorecompute.compare.rendering import chart_of, markdown, table
from megatron_autorecompute.errors import (
    AutorecomputeError,
    InfeasibleError,
    MachineError,
    OptionError,
)
from megatron_autorecompute.interrupts import end_with_parent, interrupts_held
from megatron_autorecompute.json_records import check_other, write_atomically
from megatron_autorecompute.options import option
from megatron_autorecompute.packages import lacking_kernels, needed
from megatron_autorecompute.planner.cost.hybrid_pattern import FAMILIES, HybridPattern
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.stage_problem import EARLY
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import with_missed_bytes
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.figures import save_picture
from megatron_autorecompute.report.html import html
from megatron_autorecompute.units import GIB, MOST_GIB, gib

WARM_UP_STEPS = 2
LIMITS = {
    "budget_gib": (0, MOST_GIB),
    "budget_fraction": (0, 1),
    "timeout_s": (1, 7 * 24 * 3600),
    "seed": (0, (1 << 32) - 1),
}
"""The least and the most that a number may be; of others 1 is the least."""
RECORD, TABLE = "comparison.json", "comparison.md"
PICTURE, PLAN, PAGE = "comparison.png", "plan.json", "plan.html"
FILES = (RECORD, TABLE, PICTURE, PLAN, PAGE)
CORRECTIONS = 3
"""How often a plan whose measured peak exceeds the budget is corrected."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is compared, and how often."""

    shape: Shape
    """The training job's size."""

    text: str | None = option(
        None, "file to train on, its bytes as tokens (default: this program's source)"
    )
    output: str = option("build/compare", "folder for comparison.json, .md and .png, and our plan")
    budget_gib: float | None = option(None, "memory each pipeline stage may use, in GiB")
    budget_fraction: float = option(
        0.5, "where the budget stands between full (0) and none (1) when not given in GiB"
    )
    rounds: int = option(7, "timed steps of every strategy in the table")
    tries: int = option(3, "timed steps of every setting the manual search tries, and of measuring")
    timeout_s: float = option(600.0, "longest wait of a rank for another before it gives up")

    def __post_init__(self) -> None:
        """Raises an AutorecomputeError for settings with which no comparison can run."""
        shape = self.shape
        for name, value in (asdict(shape) | asdict(self)).items():
            least, most = LIMITS.get(name, (1, 1 << 31))
            if type(value) in (int, float) and not least <= value <= most:
                raise _refused(name, value, f"it must be from {least} to {most}")
        if shape.hidden_size % shape.num_attention_heads:
            rule = f"it must be a multiple of {shape.num_attention_heads} heads"
            raise _refused("hidden_size", shape.hidden_size, rule)
        if shape.pattern is not None:
            _check_layers(shape.pattern, shape.pipeline_stages)
        elif shape.num_layers % shape.pipeline_stages:
            rule = f"it must be a multiple of {shape.pipeline_stages} stages"
            raise _refused("num_layers", shape.num_layers, rule)


def _refused(name: str, value: float, rule: str) -> OptionError:
    return OptionError(f"--{name.replace('_', '-')} {value}: {rule}.")


def _check_layers(pattern: HybridPattern, num_stages: int) -> None:
    """Raise an AutorecomputeError for layers that cannot be trained here, or in these stages."""
    Layout.from_pattern(pattern, num_stages, 1)
    for symbol in sorted({*str(pattern)}):
        shown = f"--hybrid-layer-pattern {str(pattern)!r:.200}: {symbol!r}"
        if symbol in "GD+":
            raise OptionError(
                f"{shown}: the comparison has no sizes for {FAMILIES[symbol]} layers. Give "
                "attention (*), MLP (-), MoE (E) and Mamba (M)."
            )
        if lacking := lacking_kernels(symbol):
            raise MachineError(
                f"{shown} ({FAMILIES[symbol]}) runs kernels that are not installed here. Install "
                f"{', '.join(lacking)}, or leave the layer out."
            )


def default_shape() -> Shape:
    """A step of about a second, with activations much larger than the parameters."""
    if version("torch").endswith("+cpu"):  # known without loading it, which takes seconds
        return Shape()
    import torch

    return ON_A_GPU if torch.cuda.is_available() else Shape()


def write_report(comparison: Comparison, folder: Path) -> None:
    """Draw what was measured, and write the page of the folder's plan, if there is one.

    Raises: ProfileError if it cannot.
    """
    if comparison.rows():
        save_picture(chart_of(comparison), folder / PICTURE)
        if (folder / PLAN).exists():
            write_atomically(html(report_data(Plan.load(folder / PLAN))), folder / PAGE)


def compare(settings: Settings, console: Console) -> Path:
    """Run the comparison and print its table; returns the folder with its files.

    Raises:
        AutorecomputeError: it cannot run or be saved, or a rank raised it; finished results are in
            the folder.
        KeyboardInterrupt: with what became of the folder's files.
    """
    read_text(Path(settings.text or __file__), settings.shape)
    folder = _folder(settings)
    comparison = Comparison(budget_bytes=None)
    try:
        with from_ranks(settings) as messages, Console(stderr=True).status("starting") as status:
            for message in messages:
                if isinstance(message, Comparison):
                    message.save(folder / RECORD)
                    write_atomically(markdown(message), folder / TABLE)
                    if not comparison.rows():  # those of an earlier run
                        for name in (PICTURE, PLAN, PAGE):
                            with suppress(OSError):  # what is no file is named when written
                                (folder / name).unlink()
                    comparison = message
                elif isinstance(message, Plan):
                    message.save(folder / PLAN)
                else:
                    status.update(message)
    except BaseException as error:
        with suppress(AutorecomputeError):  # the first error is the one to tell
            write_report(comparison, folder)
        if isinstance(error, KeyboardInterrupt):
            done = "what was finished is in the output folder"
            nothing = f"nothing was finished; {folder} is as it was"
            raise KeyboardInterrupt(f"{done if comparison.rows() else nothing}.") from None
        raise
    console.print(table(comparison))  # though the disk may be full by now
    write_report(comparison, folder)
    return folder


def _folder(settings: Settings) -> Path:
    """The output folder, made; raises OptionError if the text is in it, under a name that is
    written."""
    folder = Path(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    if settings.text is not None:
        for name in FILES:
            check_other(folder / name, [settings.text])
    return folder


@contextmanager
def from_ranks(settings: Settings) -> Iterator[Iterator[Any]]:
    """One process per rank, and what they say; all of them end with the block."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(settings.shape.pipeline_stages)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main, args=(said, rank, settings, f"{folder}/store"), daemon=True
            )
            for rank, (_, said) in enumerate(pipes)
        ]
        with interrupts_held():  # Ctrl-C is the parent's
            for process in processes:
                process.start()
        for _, said in pipes:
            said.close()  # so that a rank that dies closes its own
        try:
            yield messages_of([heard for heard, _ in pipes], processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def messages_of(pipes: Sequence[Any], processes: Sequence[Any]) -> Iterator[Any]:
    """The ranks' messages, from the receiving ends of their pipes, until all processes have ended.

    Raises the error of the first that fails, MachineError for one that dies: then others fail too.
    """
    left = dict(zip(pipes, processes, strict=True))
    while left:
        failed: Exception | None = None
        ready: list[Any] = wait(list(left))
        for pipe in ready:
            try:
                message = pipe.recv()
            except (EOFError, OSError):  # the rank has ended, perhaps within a message
                left.pop(pipe).join()
                continue
            if isinstance(message, Exception):
                failed = failed or message
            else:
                yield message
        for process in processes if failed else ():  # perhaps because another one died
            process.join(timeout=1)
        if dead := [rank for rank, one in enumerate(processes) if one.exitcode]:
            raise MachineError(
                f"Rank {dead[0]} died without a message (killed, or out of host memory). Finished "
                "strategies are in the output folder; smaller sizes need less memory."
            )
        if failed:
            raise failed


def _rank_main(said: Any, rank: int, settings: Settings, store_path: str) -> None:
    end_with_parent()
    try:
        with needed("The comparison"), _distributed(rank, settings, store_path):
            _compare(settings, said.send if rank == 0 else lambda message: None)
    except AutorecomputeError as error:
        said.send(error)
    except Exception:
        said.send(MachineError(f"Rank {rank} failed:\n{traceback.format_exc()}"))


@contextmanager
def _distributed(rank: int, settings: Settings, store_path: str) -> Iterator[None]:
    """torch.distributed over a file, so that no port has to be free, and Megatron's groups."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron's warnings at import about missing Transformer Engine and Apex.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    import torch
    from megatron.core import parallel_state

    from megatron_autorecompute.meta import without_cuda

    distributed: Any = torch.distributed  # mypy finds no FileStore in it
    size = settings.shape.pipeline_stages
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        if size > torch.cuda.device_count():
            raise MachineError(
                f"--pipeline-stages {size}: this machine has {torch.cuda.device_count()} GPUs, and "
                "every stage needs one. Give fewer stages."
            )
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    with nullcontext() if on_cuda else without_cuda.activate():
        try:
            torch.distributed.init_process_group(
                "nccl" if on_cuda else "gloo",
                store=distributed.FileStore(store_path, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=settings.timeout_s),
            )
        except RuntimeError as error:
            raise MachineError(
                f"The ranks cannot reach each other on this machine: {error}. Each needs a free "
                "port on the interface in GLOO_SOCKET_IFNAME, or on the one of this machine's host "
                "name."
            ) from error
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
        yield
        torch.distributed.barrier()


def _compare(settings: Settings, tell: Callable[[Any], None]) -> None:
    from megatron_autorecompute.compare.workload import TrainingJob, Variant

    # With biases, which few current models have, Megatron's own recompute of mlp never ends.
    variant = Variant({"add_bias_linear": False})
    text = read_text(Path(settings.text or __file__), settings.shape)
    job = TrainingJob(settings.shape, text, variant)
    contest = Contest(settings, job, tell)
    contest.warm_up()
    contest.anchors()
    contest.set_budget()
    contest.manual_search()
    contest.ours()
    contest.rounds()


class Contest:
    """All phases of a comparison on one rank."""

    def __init__(self, settings: Settings, job: Any, tell: Callable[[Any], None]) -> None:
        self.settings = settings
        self.job = job
        self.tell = tell
        self.comparison = Comparison(None, job=settings.shape, machine=_machine())
        self.done = 0

    def _step(self, text: str) -> None:
        self.done += 1
        self.tell(f"step {self.done}, {text}")

    def _note(self, result: StrategyResult) -> None:
        self.comparison = self.comparison.with_result(result)
        self.tell(self.comparison)

    def warm_up(self) -> None:
        """Run first steps, which allocate optimizer state, communication and shared buffers."""
        for _ in range(WARM_UP_STEPS):
            self._step("warm-up")
            self.job.step()

    def anchors(self) -> None:
        """Measure the peaks of none, selective and full, and of full without dead work."""
        known: tuple[tuple[str, Family, str], ...] = (
            ("none", "none", "megatron:none"),
            ("selective", "selective", "megatron:selective[core_attn]"),
            ("full", "full", "megatron:uniform/1"),
            ("full, no dead work", "skips", "full"),
        )
        for name, family, policy in known:
            self._note(self._measured(name, family, policy))

    def _measured(self, name: str, family: Family, policy: str) -> StrategyResult:
        """The strategy with its peak on every stage."""
        from megatron_autorecompute.runtime.ranks import all_gather

        self._step(f"{name}: memory")
        with self.job.strategy(policy):
            peaks, out_of_memory = zip(*all_gather(self.job.peak_bytes()), strict=True)
        return StrategyResult(name, family, policy, peaks, out_of_memory=any(out_of_memory))

    def set_budget(self) -> None:
        """Set the budget: as given, or a fraction of the way from full to none."""
        peaks = {s.family: max(s.peak_bytes) for s in self.comparison.strategies}
        between = peaks["full"] + self.settings.budget_fraction * (peaks["none"] - peaks["full"])
        asked = self.settings.budget_gib
        budget = int(between if asked is None else asked * GIB)
        if budget < peaks["full"]:
            raise InfeasibleError(
                f"The budget of {gib(budget)} GiB is below what full recompute of every layer "
                f"needs, {peaks['full'] / GIB:.3f} GiB on the fullest stage. Raise --budget-gib, "
                "or lower --micro-batch-size or --seq-length."
            )
        self.comparison = replace(self.comparison, budget_bytes=budget)
        self.tell(self.comparison)

    def manual_search(self) -> None:
        """Search by hand: try the settings, time those that fit, keep the fastest, if any.

        Settings that recompute more than one that fits are skipped; see `needless`.
        """
        begin = time.perf_counter()
        known = {strategy.policy: strategy for strategy in self.comparison.strategies}
        fitting: dict[str, StrategyResult] = {}
        policies: dict[str, RecomputePolicy] = {}
        for text in self.job.own_settings():
            name, policy = text.removeprefix("megatron:"), self.job.policy(text)
            if reason := needless(policy, policies):
                not_tried = (*self.comparison.not_tried, NotTried(name, reason))
                self.comparison = replace(self.comparison, not_tried=not_tried)
                continue
            result = known.get(text) or self._measured(name, "tried", text)
            result = replace(result, name=name, family="tried")
            if not self.comparison.exceeds(result):
                fitting[name] = result = self._timed(result, self.settings.tries)
                policies[name] = policy
            self._note(result)
        if not fitting:  # which the table says
            self.tell(self.comparison)
            return
        best = min(fitting.values(), key=lambda result: result.median_ms or 0.0)
        self._note(
            replace(
                best,
                name=f"manual: {best.name}",
                family="manual",
                step_ms=(),
                search_s=time.perf_counter() - begin,
            )
        )

    def _timed(self, result: StrategyResult, steps: int) -> StrategyResult:
        import torch

        from megatron_autorecompute.runtime.ranks import all_gather

        times = []
        with self.job.strategy(result.policy):
            for _ in range(steps):
                self._step(f"{result.name}: time")
                torch.distributed.barrier()
                begin = time.perf_counter()
                self.job.step()
                times.append((time.perf_counter() - begin) * 1e3)
        slowest = [max(rank) for rank in zip(*all_gather(times), strict=True)]
        return replace(result, step_ms=(*result.step_ms, *slowest))

    def ours(self) -> None:
        """Measure, solve, apply; correct the plan while its measured peak exceeds the budget.

        Raises: InfeasibleError if there is no memory to measure in, or no plan fits.
        """
        if any(s.family == "full" and s.out_of_memory for s in self.comparison.strategies):
            raise InfeasibleError(
                "The device runs out of memory even where every layer is recomputed, so choices "
                "cannot be measured and there is no plan of ours. Lower --micro-batch-size or "
                "--seq-length."
            )
        begin = time.perf_counter()
        profile, budget_bytes = self._profile(), self.comparison.budget_bytes or 0
        for _ in range(CORRECTIONS):
            plan = self._plan(profile)
            self.tell(plan)
            result = self._of_plan("ours", plan)
            if max(result.peak_bytes) <= budget_bytes:
                break
            profile = with_missed_bytes(profile, result.predicted_peak_bytes, result.peak_bytes)
        self._note(replace(result, search_s=time.perf_counter() - begin))
        if self.settings.shape.pipeline_stages > 1:
            early = self._plan(profile, (EARLY,))
            if early.policy.is_ahead:  # else it is the same plan
                self._note(self._of_plan("ours, recompute ahead", early))

    def _profile(self) -> Any:
        """A profile with every choice measured; bytes and times are read in separate steps."""
        from megatron_autorecompute.compat import stage_layout
        from megatron_autorecompute.profile import Parallelism
        from megatron_autorecompute.runtime.apply import apply
        from megatron_autorecompute.runtime.measurement import Measurement
        from megatron_autorecompute.runtime.model_shard import ModelShard

        job, shape = self.job, self.settings.shape
        leanest = RecomputePolicy.parse(
            "full", num_layers=stage_layout.num_policy_layers(job.config)
        )
        with apply(leanest, job.chunks, holder="the comparison's measuring") as applied:
            shard = ModelShard(job.chunks)
            measurement = Measurement(shard, applied)
            for _ in measurement.policies():
                self._step("ours: measuring memory")
                with job.memory() as memory, measurement.watch(memory, times=False):
                    job.step()
            for is_timed in measurement.turns(microbatches=shape.num_microbatches):
                self._step("ours: measuring time")
                with measurement.watch(None, times=is_timed):
                    job.step()
            model = shard.model()
            return measurement.profile(
                replace(model, facts=asdict(shape) | model.facts),
                Parallelism(
                    shape.micro_batch_size,
                    shape.seq_length,
                    dtype="bfloat16" if shape.bf16 else "float32",
                ),
                job.static(),
                fingerprint=self.comparison.machine,
            )

    def _plan(self, profile: Any, allowed: Sequence[str] | None = None) -> Plan:
        """The best plan for this profile."""
        from megatron_autorecompute.compat import stage_layout
        from megatron_autorecompute.runtime.ranks import on_rank_0

        shape = self.settings.shape
        layout = stage_layout.pipeline_layout(self.job.config)
        schedule = Schedule(shape.pipeline_stages, 1, shape.num_microbatches)
        budget = self.comparison.budget_bytes or 0
        problem = Problem(profile, layout, schedule, budget, allowed=allowed)
        return on_rank_0(lambda: make_plan(problem))

    def _of_plan(self, name: str, plan: Plan) -> StrategyResult:
        """A plan with its measured peak on every stage."""
        predicted = tuple(stage.peak.bytes for stage in plan.cost.stages)
        result = self._measured(name, "ours", plan.policy.format())
        return replace(result, predicted_peak_bytes=predicted, predicted_step_ms=plan.cost.step_ms)

    def rounds(self) -> None:
        """Time all rows of the table in turn, so that a slow moment of the machine hits all."""
        for number in range(self.settings.rounds):
            rows = [row for row in self.comparison.rows() if not row.out_of_memory]
            start = number % len(rows)
            for row in rows[start:] + rows[:start]:
                self._note(self._timed(row, 1))
        self.comparison = replace(self.comparison, complete=True)
        self.tell(self.comparison)


def _machine() -> dict[str, str]:
    import megatron.core
    import torch

    on_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_cuda else f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
    }
