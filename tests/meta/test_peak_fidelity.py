"""The cost model's peaks against Megatron's own schedule on meta tensors, at real sizes.

The profile comes from a shard of a few layers, by the code that measures in a job; the policies
are random mixes that it never saw. `benchmarks/peak_fidelity.py` runs many more of both.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.peak_fidelity import (
    CASES,
    HIGHEST,
    LOWEST,
    PAGE,
    RESULTS,
    case_points,
    stages_of,
    with_table,
)
from megatron_autorecompute.planner.cost.p2p_tensors import extra_owners
from megatron_autorecompute.planner.cost.schedule import Schedule
from testing.ranks import fresh_processes
from tests.meta.boundary_tensors import boundary_tensors
from tests.planner.definitions import COUNTED
from tests.planner.moments import in_flight
from tests.support import tiny_config

pytestmark = pytest.mark.any_version
BY_NAME = {case.name: case for case in CASES}


def with_fewer_layers(name):
    """A case with a quarter of its layers; without chunks with no more microbatches than it takes
    to fill and go on."""
    case = BY_NAME[name]
    count = case.num_microbatches if case.vp else case.pp + 1
    return replace(case, num_layers=case.num_layers // 4, num_microbatches=count)


@pytest.fixture(scope="module")
def fresh_process():
    context = fresh_processes()
    with ProcessPoolExecutor(1, context) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=280)


def out_of_bounds(points):
    return [point for point in points if not LOWEST <= point.error <= HIGHEST]


@pytest.mark.parametrize("name", ["llama 7b, v=2", "gpt 22b"])
def test_predicted_peaks_are_those_of_megatrons_schedule(fresh_process, name):
    case = with_fewer_layers(name)
    assert out_of_bounds(fresh_process(case_points, case, stages_of(case), 1)) == []


@pytest.mark.parametrize("name", ["llama 70b, p=16, v=5"])
def test_predicted_peaks_hold_on_sixteen_interleaved_stages(fresh_process, name):
    case = replace(BY_NAME[name], num_layers=32, vp=2)
    assert out_of_bounds(fresh_process(case_points, case, (0, 15), 1)) == []


@pytest.mark.parametrize(("name", "stages"), [("mixtral, v=2", (0, 3))])
def test_predicted_peaks_of_moe_layers_are_those_of_megatrons_schedule(fresh_process, name, stages):
    case = with_fewer_layers(name)
    assert out_of_bounds(fresh_process(case_points, case, stages, 1)) == []


def test_the_page_has_the_table_of_the_result_file():
    assert PAGE.read_text() == with_table(PAGE.read_text(), json.loads(RESULTS.read_text()))


def test_no_point_of_the_result_file_is_out_of_bounds():
    for version, results in json.loads(RESULTS.read_text()).items():
        outside = [p for p in results["points"] if not LOWEST <= p["error"] <= HIGHEST]
        assert outside == [], version


# p, v, microbatches, group size
SCHEDULES = [
    (2, 1, 4, None),
    (4, 1, 8, None),
    (4, 1, 2, None),
    (2, 2, 4, None),
    (3, 2, 6, None),
    (4, 2, 8, None),
    (2, 3, 2, None),
    (2, 3, 5, 3),
    (4, 2, 8, 8),
    (3, 2, 7, 4),
    (4, 2, 4, None),
    (4, 5, 12, None),
]


def counted(schedule, stage, overlap, deallocated):
    """`boundary_tensors` without the kept outputs of microbatches in flight, the loss excepted."""
    several = schedule.num_chunks > 1
    config = tiny_config(
        num_layers=schedule.num_stages * schedule.num_chunks,
        pipeline_model_parallel_size=schedule.num_stages,
        virtual_pipeline_model_parallel_size=schedule.num_chunks if several else None,
        microbatch_group_size_per_vp_stage=schedule.group_size if several else None,
        overlap_p2p_comm=overlap,
        deallocate_pipeline_outputs=deallocated,
        bf16=True,
    )
    found = []
    for tensors, waiting in zip(
        boundary_tensors(config, stage, schedule.num_microbatches),
        in_flight(schedule, stage),
        strict=True,
    ):
        waiting[tensors.chunk] += tensors.phase == "backward"
        if stage == schedule.num_stages - 1:
            waiting[-1] = 0
        found.append(tensors.extra - (0 if deallocated else sum(waiting)))
    return tuple(found)


def differing(p, v, m, group):
    """Settings and stages where the replay counts other tensors than Megatron's schedule has."""
    schedule = Schedule(p, v, m, group)

    def replayed(stage, overlap, deallocated):
        owners = extra_owners(schedule, stage, overlap_p2p=overlap, deallocated=deallocated)
        return tuple(map(len, owners))

    return [
        (stage, overlap, deallocated)
        for overlap in ((True, False) if v > 1 else (False,))
        for deallocated in (True, False)
        for stage in range(p)
        if counted(schedule, stage, overlap, deallocated) != replayed(stage, overlap, deallocated)
    ]


@pytest.mark.parametrize(("p", "v", "m", "group"), SCHEDULES)
def test_replayed_boundary_tensors_are_those_of_megatrons_schedule(fresh_process, p, v, m, group):
    assert fresh_process(differing, p, v, m, group) == []


def unlike_the_definitions():
    """Rows of the table of the planner's brute force that are not what Megatron's schedule has."""
    return [
        row
        for row, stages in COUNTED.items()
        for stage, digits in enumerate(stages)
        if counted(Schedule(*row[:3]), stage, *row[3:]) != tuple(map(int, digits))
    ]


def test_the_brute_forces_boundary_tensors_are_those_of_megatrons_schedule(fresh_process):
    assert fresh_process(unlike_the_definitions) == []
