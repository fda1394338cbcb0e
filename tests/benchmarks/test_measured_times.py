"""Steps and ratios of steps beside measured ones."""

import csv
import importlib.util
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from benchmarks.gpu import fit
from benchmarks.measured import page, ratios, times
from benchmarks.measured.flags import FieldError
from benchmarks.measured.machines import AWS, HOSTS, OWN, machines
from benchmarks.measured.megatron_tests import first_batch
from benchmarks.measured.prediction import Prediction
from benchmarks.measured.results import results
from benchmarks.measured.runs import Run
from benchmarks.measured.tables import read
from megatron_autorecompute.meta.devices import devices

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
GOLDEN, B200 = DATA / "megatron_golden_memory.csv", DATA / "b200_measured.csv"


@pytest.mark.any_version
@pytest.mark.filterwarnings("ignore:apply_rope_fusion")
@pytest.mark.parametrize("one", list(ratios.published()), ids=lambda one: one.job.name)
def test_a_setting_costs_what_was_published(one):
    """0.025 of a step, whatever the layers are; launches decide the one microbatch of Moonlight."""
    within = 0.085 if one.job.name == "moonlight" else 0.025
    for row in ratios.ratios(one):
        assert row["predicted"] == pytest.approx(row["published"], rel=within), row


@pytest.mark.any_version
def test_a_setting_costs_a_layer_what_one_gpu_measured():
    for row in ratios.layers():
        assert row["predicted"] == pytest.approx(row["published"], rel=0.025), row


HAS_PARSER = importlib.util.find_spec("megatron.training") is not None


@pytest.mark.skipif(not HAS_PARSER, reason="this wheel of megatron-core has no flags")
@pytest.mark.parametrize(
    ("path", "name", "within"),
    [
        (B200, "llama3_405b_l4_tp8_pp1_dp1_mbc4_cef", 0.07),
        (B200, "llama3_405b_l4_tp1_pp2_dp4_mbc32_cef", 0.05),
        (B200, "deepseekv3_l4_tp1_ep4_pp2_dp4_mbc8_cef", 0.07),
        (GOLDEN, "gpt3_7b_tp1_pp4_memory_speed (h100)", 0.12),  # deterministic: attention is slower
    ],
)
def test_steps_that_nothing_was_fitted_on_are_near_the_measured_ones(path, name, within):
    from benchmarks.measured.__main__ import case
    from benchmarks.measured.prediction import predicted

    run = next(row for row in read(path) if row.name == name)
    found = times.point(run, predicted(case(run)))
    assert found["role"] == times.JUDGES
    assert abs(found["error"]) <= within, json.dumps(found)


@pytest.mark.skipif(not HAS_PARSER, reason="this wheel of megatron-core has no flags")
def test_our_own_steps_that_nothing_disturbed_take_as_long_on_an_h100():
    """With GELU in one kernel, which it was not, no share of products suits mlp and the others."""
    own = fit.steps()
    assert len({step.flags for step in own}) == 4
    reached = devices()[fit.GPU].reaches
    for step in own:
        assert step.predicted_ms(reached) == pytest.approx(step.measured_ms, rel=0.04), step.name
    layer = fit.layer_predicted_ms(reached)
    for name, measured_ms in fit.layer_measured_ms().items():
        assert layer[name] == pytest.approx(measured_ms, rel=0.1), name


@pytest.mark.any_version
def test_the_rows_say_what_each_is_for():
    runs = [row for path in (B200, GOLDEN) for row in read(path) if isinstance(row, Run)]
    timed = [run for run in runs if run.step_ms and not run.uncovered]
    chosen = {times.role(run): run for run in timed}
    roles = {times.FITTED, times.JUDGES, times.LAUNCHES, times.ASSUMED, times.CHECKS}
    assert set(chosen) == roles
    fitted = [run for run in timed if times.role(run) == times.FITTED]
    assert len(fitted) == 9  # as devices.json says
    points = [
        times.point(run, Prediction(num_gpus=8, step_ms=run.step_ms * 1.1))
        for run in chosen.values()
    ]
    ratio = {"job": "a job", "setting": "full", "base": "none", "source": "somebody"}
    data = {
        **results([], []),
        "times": points,
        "ratios": [{**ratio, "published": 1.2, "predicted": 1.26}],
    }
    text, rows = page.text(data), page.rows(data)
    for run in chosen.values():
        assert (run.name in rows) == (times.role(run) not in (times.LAUNCHES, times.CHECKS))
    assert "| a job | full | none | 1.200 | 1.260 | +5.0% | somebody |" in text


@pytest.mark.any_version
def test_tests_that_github_alone_could_have_recorded_have_the_host_of_its_runners():
    from benchmarks.measured.__main__ import case

    runs = [row for row in read(GOLDEN) if isinstance(row, Run)]
    known = {run.machine for run in runs if run.gpu.startswith("h100")}
    assert known == {AWS, OWN, ""}
    assert {run.machine for run in runs if not run.gpu.startswith("h100")} == {""}
    run = next(run for run in runs if run.machine == AWS)
    assert machines()[run.recorded_with] == AWS
    assert case(run).host == HOSTS[AWS] > case(replace(run, machine=OWN)).host == 1


@pytest.mark.any_version
def test_a_run_without_a_time_has_no_point():
    run = next(row for row in read(B200))
    assert times.point(replace(run, step_ms=None), Prediction(step_ms=1.0)) is None
    assert times.point(run, Prediction()) is None


@pytest.mark.any_version
def test_a_batch_that_has_not_grown_yet_is_the_first_one():
    given = {"rampup-batch-size": "[384 384 97656250]", "global-batch-size": 1152}
    first = {"global-batch-size": 384, "rampup-batch-size": False}
    assert first_batch(given, {"steps": "50800"}) == first
    assert first_batch(given, {"steps": "200000"}) == {}
    with pytest.raises(FieldError, match="rampup-batch-size"):
        first_batch({**given, "rampup-batch-size": "[384]"}, {"steps": "1"})


@pytest.mark.any_version
def test_every_parameter_names_a_source():
    table = resources.files("megatron_autorecompute.meta").joinpath("devices.json")
    known = json.loads(table.read_text())["sources"]
    for one in devices().values():
        assert set(one.reached_by) == set(one.reaches.__slots__)
        assert set(one.reached_by.values()) <= set(known)


@pytest.mark.any_version
def test_every_timed_row_is_read():
    with open(GOLDEN, newline="", encoding="utf-8") as file:
        timed = sum(bool(row["iter_s_median_2nd_half"]) for row in csv.DictReader(file))
    found = [row for row in read(GOLDEN) if isinstance(row, Run) and row.step_ms]
    unread = [r for r in read(GOLDEN) if not isinstance(r, Run) or r.flags_without_quantising]
    assert timed - len(unread) <= len(found) <= timed
