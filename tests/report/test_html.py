"""The page says what the plan says, stands by itself, and is small."""

import base64
import gzip
import json
import re
import shlex
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.html import html, packed, page_data
from megatron_autorecompute.report.recorded import recorded_step
from megatron_autorecompute.units import GIB
from tests.report.plans import THREE, example_data, long_step, random_plan
from tests.report.snapshots import as_planned, dumped


@pytest.fixture(scope="module")
def data():
    return example_data(*THREE["gpt-760m-48l"])


def text_of(page):
    body = re.sub(r"(?s)<(script|style).*?</\1>", "", page)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", body)))


def test_the_first_sentence_says_fit_step_gain_and_tightest_stage(data):
    plan = data.plan
    text = text_of(html(data))
    needs = [stage.peak_high_bytes for stage in plan.cost.stages]
    tightest = f"the tightest, stage {needs.index(max(needs))}, has"
    assert f"Fits: every stage within 20.00 GiB; {tightest}" in text
    gain = 100 * (1 - plan.cost.step_ms / plan.best_manual.step_ms)
    took = f"A step takes {plan.cost.step_ms / 1000:.2f} s, {gain:.1f}% less"
    assert f"{took} than with Megatron's best own setting" in text


def test_the_header_says_on_what_and_whether_it_is_measured(data):
    profile = replace(data.plan.profile, fingerprint={"device": "h100-80gb"})
    told = replace(data, plan=replace(data.plan, profile=profile), speed="3 tokens/s on 64 GPUs.")
    text = text_of(html(told))
    assert "· h100-80gb · modelled, not measured Fits" in text
    assert "3 tokens/s on 64 GPUs." in text
    kinds = [
        replace(kind, choices=tuple(replace(c, source="measured") for c in kind.choices))
        for kind in profile.kinds
    ]
    measured = replace(data.plan, profile=replace(profile, kinds=tuple(kinds)))
    assert "· h100-80gb · measured Fits" in text_of(html(replace(data, plan=measured)))


def test_a_plan_over_its_budget_is_said_not_to_fit(data):
    plan = replace(data.plan, budget_bytes=(1 << 30,) * 4)
    text = text_of(html(replace(data, plan=plan)))
    needs = [stage.peak_high_bytes for stage in plan.cost.stages]
    most = f"stage {needs.index(max(needs))} needs {max(needs) / GIB:.2f} GiB of 1.00 GiB"
    assert f"Does not fit: {most}." in text


def test_no_gain_and_no_setting_that_fits_are_said(data):
    best = replace(data.plan.best_manual, step_ms=data.plan.cost.step_ms)
    same = replace(data, plan=replace(data.plan, best_manual=best))
    assert "as long as with Megatron's best own setting" in text_of(html(same))
    alone = replace(data, plan=replace(data.plan, best_manual=None))
    assert "none of Megatron's own settings fits" in text_of(html(alone))


def test_the_page_asks_for_nothing_outside_itself(data):
    page = html(data)
    assert (
        re.findall(
            r"""src\s*=|href\s*=\s*"(?!\#)|@import|url\((?!#)|fetch\(|XMLHttp|import\(""", page
        )
        == []
    )
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= names
    assert "{{" not in page


def test_the_same_plan_gives_the_same_page(data):
    assert html(data) == html(data)


def test_names_are_escaped(data):
    profile = data.plan.profile
    odd = replace(profile, model=replace(profile.model, name='<b>&"</b>'))
    page = html(replace(data, plan=replace(data.plan, profile=odd)))
    assert '<b>&"' not in page
    assert "&lt;b&gt;&amp;" in page


def test_no_setting_of_megatrons_beats_the_curve_in_the_same_bytes(data):
    for strategy in data.curve.strategies:
        within = [p for p in data.curve.points if p.budget_bytes <= strategy.peak_high_bytes]
        if within:
            assert min(p.step_ms for p in within) <= strategy.step_ms * (1 + 1e-9)


def test_the_curve_passes_the_plan_and_never_gets_slower_with_more_bytes(data):
    times = [point.step_ms for point in data.curve.points]
    assert times == sorted(times)
    assert data.plan.cost.step_ms in times


def test_what_is_drawn_adds_up_to_the_planned_bytes_and_times(data):
    unpacked = json.loads(gzip.decompress(base64.b64decode(packed(page_data(data)))))
    for drawn, stage in zip(unpacked["stages"], data.timeline.stages, strict=True):
        for column in ("in_flight_bytes", "outside_bytes", "overhead_bytes", "chunk", "microbatch"):
            assert np.cumsum(drawn[column]).tolist() == getattr(stage, column).tolist()
        ends = np.cumsum(np.add(drawn["gap_ms"], drawn["ms"]))
        assert ends == pytest.approx(stage.end_ms, abs=0.01)


@pytest.fixture(scope="module")
def with_snapshot(data, tmp_path_factory):
    recorder = as_planned(data.plan, 1, more={9: 40 << 20})
    path = dumped(recorder.snapshot(), tmp_path_factory.mktemp("recorded") / "<rank> 2.pickle")
    return replace(data, recorded=recorded_step(data.plan, path, 1))


def test_a_recorded_step_is_a_line_and_a_table(with_snapshot):
    page = html(with_snapshot)
    text = text_of(page)
    assert "Recorded beside predicted: stage 1" in text
    assert "<rank> 2.pickle. The last whole step of the history" in text
    assert re.search(
        r"The step's parts at their fullest moments; \d+ with smaller differences, or none", text
    )
    assert re.search(r"backward of microbatch 3 of chunk 1.*?\+320\.0 MiB", text)
    assert "<rank>" not in page
    drawn = json.loads(gzip.decompress(base64.b64decode(packed(page_data(with_snapshot)))))
    drawn = drawn["recorded"]
    step = with_snapshot.recorded
    assert drawn["stage"] == 1
    assert np.cumsum(drawn["level_bytes"]).tolist() == step.level_bytes.tolist()
    assert np.cumsum(drawn["at_ms"]) == pytest.approx(step.at_ms, abs=0.01)


def test_without_a_snapshot_there_is_no_such_section(data):
    assert "Recorded beside predicted" not in html(data)
    assert page_data(data)["recorded"] is None


@pytest.mark.parametrize("seed", [0, 4, 11, 20])
def test_any_plan_has_a_report(seed):
    assert "Where memory is tight" in html(report_data(random_plan(seed)))


def test_a_step_of_65536_events_is_less_than_2_mb():
    data = long_step()
    assert sum(len(stage.chunk) for stage in data.timeline.stages) == 65_536
    assert len(html(data).encode()) < 2_000_000


def test_flags_to_paste_of_an_edited_plan_are_words_of_a_shell():
    plan = replace(random_plan(0), megatron_flags={"--hybrid-layer-pattern": "M*|-;E"})
    (text,) = [t for t, where in report_data(plan).pastes.items() if "pretrain_gpt.py" in where]
    assert shlex.split(text)[2:] == ["--hybrid-layer-pattern", "M*|-;E"]
