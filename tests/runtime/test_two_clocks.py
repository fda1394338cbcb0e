"""Steps predicted from what was measured, on a device whose truth is known."""

import random
import statistics
from dataclasses import dataclass, replace

import pytest

from benchmarks.gpu import cases
from benchmarks.gpu.mixes import random_policies
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_interval import StepErrors
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Model, Parallelism
from megatron_autorecompute.report.words import binds as decides
from megatron_autorecompute.runtime.probe import Host
from megatron_autorecompute.runtime.samples import lower_quartile, of_parts
from testing.ranks import run_ranks
from tests.oracle_device import Device, Reader

BINDS = {"device": (1.4, 3.0), "mixed": (0.85, 1.15), "host": (0.35, 0.75)}
"""What a step's kernels take, in what its launches take, under no recompute."""


@dataclass(frozen=True)
class Size:
    """Layers of random models, from and to; policies and budgets of each."""

    layers: tuple[int, int]
    policies: int
    budgets: int


OF_A_TEST, OF_THE_TABLE = Size((3, 4), 12, 3), Size((4, 6), 40, 8)


class Clock:
    """As `DeviceClock` on CUDA."""

    def __init__(self, device):
        self.device = device

    def now(self):
        event = self.device.event()
        event.record()
        return event

    def ms_between(self, begin, end):
        return begin.elapsed_time(end)


class OnDevice:
    """A random model of Megatron's layers on a random device."""

    def __init__(self, seed, binds, layers):
        from megatron.core import parallel_state

        rng = random.Random(f"{seed} {binds}")
        parallel_state.initialize_model_parallel()
        case = rng.choice([cases.DENSE, cases.MLA]).sized(tiny=True)
        layers, microbatches = rng.randint(*layers), rng.choice([2, 3])
        shape = replace(case.shape, num_layers=layers, num_microbatches=microbatches)
        self.job = cases.built(replace(case, shape=shape))
        self.device = Device(f"{seed} {binds}", binds)
        self.job.step()
        self.job.optimizer.step = self.device.synchronize  # it reads the norm of all gradients
        with self.device.running():
            self.device.binds(self.job.step, rng.uniform(*BINDS[binds]))
        self.shape = shape

    def policy(self, text):
        return RecomputePolicy.parse(text, num_layers=self.shape.num_layers)

    def step_ms(self, policy, steps=1):
        from megatron_autorecompute.runtime.apply import apply

        with apply(policy, self.job.chunks), self.device.running():
            return [self.device.step_ms(self.job.step) for _ in range(steps)]

    def profile(self):
        """As a job measures it, and what a step takes besides, in steps that are disturbed."""
        from megatron_autorecompute.runtime.apply import apply
        from megatron_autorecompute.runtime.measurement import Measurement
        from megatron_autorecompute.runtime.model_shard import ModelShard

        job, device, shape = self.job, self.device, self.shape
        with apply(self.policy("full"), job.chunks) as applied, device.running():
            measurement = Measurement(ModelShard(job.chunks), applied, Clock(device), host=Host())
            for _ in measurement.policies():
                with job.memory() as live, measurement.watch(Reader(device, live), times=False):
                    device.step_ms(job.step)
            for is_timed in measurement.turns(microbatches=shape.num_microbatches):
                with measurement.watch(None, times=is_timed):
                    device.step_ms(job.step)
            return measurement.profile(
                Model("GPT", shape.num_layers),
                Parallelism(shape.micro_batch_size, shape.seq_length),
                job.static(),
            )

    def rest_ms(self, problem):
        """What a step takes besides, as the benchmark on a GPU measures it: of two policies the
        least, and the most that it can be."""
        seen, steps = {"full": [], "none": []}, {}
        self.device.is_quiet = True
        for text in seen:
            self.step_ms(self.policy(text), 2)
            steps[text] = self.device.last_step()
        self.device.is_quiet = False
        for _ in range(6):
            for text, found in seen.items():
                found += [self.device.step_ms(steps[text]) for _ in range(3)][1:]
        left = [
            lower_quartile(ms) - problem.cost(self.policy(text)).step_ms
            for text, ms in seen.items()
        ]
        return max(0.0, min(left)), max(0.0, *left)


def added_up(profile):
    """Of sets of modules, by how much their parts' times are not their own, on both clocks."""
    records = {record.policy: record for record in profile.kinds[0].choices}
    for choice, own in records.items():
        if len(choice.modules) > 1:
            parts = of_parts(choice, records)
            for found, true in ((parts, own), (parts.host, own.host)):
                true_ms = true.forward_ms + true.backward_ms
                yield (found.forward_ms + found.backward_ms) / true_ms - 1


def compared(seed, binds, size):
    """Of random policies the bytes, the predicted step with its interval, and the true one; by how
    much plans are slower than the fastest of them that fits; what is said of the host; `added_up`.
    """
    own = OnDevice(seed, binds, size.layers)
    own.device.is_quiet = False
    profile, layers = own.profile(), own.shape.num_layers
    layout, schedule = Layout.from_flags(layers, 1), Schedule(1, 1, own.shape.num_microbatches)
    problem = Problem(profile, layout, schedule)
    rest_ms, most_ms = own.rest_ms(problem)
    own.device.is_quiet = True
    rows = []
    for policy in random_policies(profile, size.policies):
        cost, found = problem.cost(policy), StepErrors(problem.costs, policy).interval()
        ends = found.low_ms + rest_ms, found.high_ms + most_ms
        peak, predicted_ms = cost.peak_high_bytes, cost.step_ms + rest_ms
        rows.append((peak, predicted_ms, *ends, *own.step_ms(policy)))
    lean, fast = problem.stages.leanest[0].peak_bytes, problem.stages.fastest[0].peak_bytes
    slower, said = [], []
    for number in range(size.budgets):
        plan = make_plan(problem.at(lean + (fast - lean) * number // (size.budgets - 1)))
        (own_ms,) = own.step_ms(plan.policy)
        fitting = [row[-1] for row in rows if row[0] <= plan.budget_bytes[0]]
        slower.append(own_ms / min(fitting, default=own_ms) - 1)
        said.append(decides(plan))
    return rows, slower, said, list(added_up(profile))


@pytest.mark.newest_version
@pytest.mark.parametrize("binds", ["device", "host"])
def test_steps_and_the_order_of_policies_are_those_of_the_device(binds):
    rows, slower, said, apart = run_ranks(compared, 1, 0, binds, OF_A_TEST, timeout_s=900)[0]
    errors = [abs(predicted_ms / true_ms - 1) for _, predicted_ms, _, _, true_ms in rows]
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.05
    held = [low_ms <= true_ms <= high_ms for _, _, low_ms, high_ms, true_ms in rows]
    # Steps of one profile share its errors; tests/planner/test_two_clocks.py counts profiles.
    assert sum(held) >= 0.9 * len(rows)
    assert max(slower) < 0.01
    assert max(map(abs, apart)) < 0.015 < len(apart)
    assert all(words.lower().startswith(f"{binds}-bound") for words in said) or binds == "mixed"


def table(seeds, names):
    """Prints what random models give; for the page of the decision."""
    for binds in names:
        for seed in range(seeds):
            rows, slower, said, _ = run_ranks(
                compared, 1, seed, binds, OF_THE_TABLE, timeout_s=900
            )[0]
            signed = [predicted / true - 1 for _, predicted, _, _, true in rows]
            errors = [abs(each) for each in signed]
            held = statistics.mean(low <= true <= high for _, _, low, high, true in rows)
            wrong = statistics.mean(_is_beaten(rows, row[0]) for row in rows)
            print(
                f"{binds} {seed}: median {statistics.median(errors):.2%}, worst {max(errors):.2%}, "
                f"signed {statistics.median(signed):+.2%}, held {held:.0%}, beaten {wrong:.0%}, "
                f"plans slower by {max(slower):.2%}, {said[-1]}",
                flush=True,
            )


def _is_beaten(rows, budget):
    """Whether what is predicted to be fastest is slower by 1% than another one that fits."""
    fitting = [row for row in rows if row[0] <= budget]
    return min(fitting, key=lambda row: row[1])[-1] > 1.01 * min(row[-1] for row in fitting)


if __name__ == "__main__":
    import sys

    table(int(sys.argv[1]), sys.argv[2:] or BINDS)
