"""Reports in a real browser: of a dense example, one with experts, and a step of 65,536 events."""

import re
from dataclasses import replace

import pytest

from megatron_autorecompute.cli.program import main
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.figures import strip_svg
from megatron_autorecompute.report.html import html
from megatron_autorecompute.report.words import size
from testing.browser import chromium, opened
from tests.report.plans import copying_plan, early_plan, long_step

SHOWN = "llama31-405b", "deepseek-v3"
WHOLE = "view[0] === 0 && view[1] === end"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PAINTED = """id => {
  const canvas = document.getElementById(id);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
}"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def reports(browser, examples):
    for job in SHOWN:
        assert main(["report", str(examples.folder / f"{job}.plan.json")]) == 0
    return examples.folder


@pytest.fixture(params=SHOWN)
def report(request, reports):
    return reports / f"{request.param}.plan.html"


@pytest.fixture
def llama(reports):
    return reports / "llama31-405b.plan.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_draws_itself_without_network_and_without_a_message(browser, report, scheme):
    with opened(browser, report, scheme=scheme) as found:
        assert (found.asked, found.said) == ([], [])
        for picture in ("pipeline", "memory"):
            assert found.page.evaluate(PAINTED, picture) > 8
        light = found.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert light == (scheme == "light")


def test_copies_have_rows_of_their_own_and_the_step_is_as_long_as_with_its_waits(browser, tmp_path):
    plan = copying_plan(0)
    page = tmp_path / "plan.html"
    page.write_text(html(report_data(plan)))
    with opened(browser, page) as found:
        assert found.page.evaluate("data.step") == pytest.approx(plan.cost.step_ms)
        ends = found.page.evaluate("Math.max(...stages.map(stage => stage.end[stage.count - 1]))")
        assert ends == pytest.approx(plan.cost.step_ms)
        fullest = found.page.evaluate("stages.map(stage => total(stage.fullest))")
        assert fullest == [cost.peak.bytes for cost in plan.cost.stages]
        # From the top: stage 0, its two rows of copies, stage 1, the axis.
        height = 26 + 2 * 12 + 26 + 20
        found.over("#pipeline", 0.3, (26 + 6) / height)
        assert found.tip.startswith("To host memory: core_attn of layer ")
        found.over("#pipeline", 0.3, (26 + 18) / height)
        assert found.tip == "Stage 0: nothing is copied to the device"
        found.over("#pipeline", 0.3, (26 + 24 + 13) / height)
        assert "stage 1" in found.tip
        assert found.said == []


def test_what_begins_early_has_a_bar_of_its_own(browser, tmp_path):
    plan = early_plan()
    page = tmp_path / "plan.html"
    page.write_text(html(report_data(plan)))
    with opened(browser, page) as found:
        ends = found.page.evaluate("Math.max(...stages.map(stage => stage.end[stage.count - 1]))")
        assert ends == pytest.approx(plan.cost.step_ms)
        begun = "stages.map(stage => [...new Set(stage.ahead)].filter(Boolean).sort())"
        early = [sorted(set(filter(None, cost.ahead_ms))) for cost in plan.cost.stages]
        assert found.page.evaluate(begun) == [pytest.approx(own) for own in early]
        assert "recompute begun early" in found.page.inner_text("#pipeline-keys")
        assert found.said == []


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_a_report_scrolls_sideways_at_no_width(browser, report, width):
    with opened(browser, report, width=width) as found:
        assert found.ask(SIDEWAYS) == 0


EVENT = """(() => {
    const stage = stages[0], canvas = document.querySelector("#pipeline").clientWidth;
    const event = [...stage.start.keys()].find(each => stage.start[each] > 0.3 * end);
    const middle = (stage.start[event] + stage.end[event]) / 2;
    return xOf(middle, canvas - GUTTER) / canvas;
})()"""
"""Where an event of stage 0 is, as a share of the picture's width."""


def test_the_mouse_finds_events_waiting_memory_and_points_of_the_curve(browser, llama):
    took_s = Plan.load(llama.with_suffix(".json")).cost.step_ms / 1e3
    with opened(browser, llama) as found:
        found.over("#pipeline", found.ask(EVENT), 0.05)
        assert found.tip.startswith(("Forward: stage 0", "Backward: stage 0"))
        assert "alive of 73.14 GiB" in found.tip
        found.over("#memory", 0.3, 0.5)
        assert "static (weights, gradients, optimizer)" in found.tip
        found.over("#pipeline", 0.01, 0.05)
        assert found.tip == ""
        found.page.locator(".curve .ours").hover()
        assert found.tip.startswith(f"This plan: {took_s:.1f} s")
        assert found.said == []


def test_wheel_buttons_and_dragging_zoom_and_move(browser, llama):
    with opened(browser, llama) as found:
        assert found.ask(WHOLE)
        found.over("#pipeline", 0.5, 0.3)
        under = found.ask("(view[0] + view[1]) / 2")
        found.page.keyboard.down("Control")
        found.page.mouse.wheel(0, -400)
        found.page.keyboard.up("Control")
        found.page.wait_for_function("view[1] - view[0] < end / 2")
        begin, stop = found.ask("view")
        assert begin < under < stop
        found.page.mouse.down()
        found.over("#pipeline", 0.3, 0.3)
        found.page.mouse.up()
        assert found.ask("view[0]") > begin
        found.page.click("#all")
        assert found.ask(WHOLE)
        found.page.click("#peak")
        assert found.ask("view[1] - view[0] < end / 10")


def test_keys_alone_reach_events_stages_and_the_fullest_moment(browser, llama):
    with opened(browser, llama) as found:
        found.page.focus("#pipeline")
        for key in ("p", "ArrowRight", "ArrowLeft"):
            found.page.keyboard.press(key)
        last = found.ask("stages.length") - 1
        for key, move in (("ArrowUp", -1), ("ArrowDown", 1)):
            found.page.keyboard.press("p")
            fullest = int(re.search(r"stage (\d+), chunk", found.page.inner_text("#said"))[1])
            found.page.keyboard.press(key)
            stage = min(max(fullest + move, 0), last)
            assert f"stage {stage}, chunk" in found.page.inner_text("#said")
        assert found.tip.startswith(("Forward", "Backward"))
        found.page.keyboard.press("0")
        assert found.ask(WHOLE)


@pytest.mark.parametrize("way", ["key", "button"])
def test_the_status_line_is_of_the_fullest_moment_as_planned(browser, llama, way):
    plan = Plan.load(llama.with_suffix(".json"))
    with opened(browser, llama) as found:
        cost = plan.cost.stages[found.ask("focus")]
        microbatch = re.search(r"microbatch \d+", cost.peak.moment)[0]
        found.page.focus("#pipeline")
        found.page.keyboard.press("ArrowRight")
        assert f"{microbatch}:" not in found.page.inner_text("#said")
        found.page.keyboard.press("p") if way == "key" else found.page.click("#peak")
        said = found.page.inner_text("#said")
        assert f"stage {cost.stage}, chunk" in said
        assert f"{microbatch}:" in said
        assert said.endswith(f"at most {size(cost.peak.bytes)} alive")


def test_where_the_optimizer_step_is_the_fullest_the_status_line_says_so(browser, llama):
    with opened(browser, llama) as found:
        found.page.focus("#pipeline")
        found.page.keyboard.press("ArrowRight")
        found.ask("stages[focus].binding = null")
        found.page.keyboard.press("p")
        stage = found.ask("focus")
        assert found.page.inner_text("#said").startswith(f"Optimizer step, stage {stage}: at most")
        assert found.ask("view[1] === end")


def test_the_status_line_is_of_what_is_clicked(browser, llama):
    with opened(browser, llama) as found:
        found.page.focus("#pipeline")
        found.page.keyboard.press("p")
        found.over("#pipeline", found.ask(EVENT), 0.05)
        clicked, under = found.page.inner_text("#said"), found.tip.splitlines()[0]
        found.page.mouse.down()
        found.page.mouse.up()
        assert found.page.inner_text("#said") != clicked
        assert found.page.inner_text("#said").startswith(under.replace(": ", ", "))


def test_on_paper_there_are_no_buttons_and_nothing_is_cut_off(browser, report):
    with opened(browser, report, width=680, scheme="dark") as found:  # A4 between its margins
        found.page.emulate_media(media="print")
        assert found.page.locator("button:visible").count() == 0
        assert found.ask(SIDEWAYS) == 0
        inner = "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
        assert max(found.ask(inner)) == 0
        assert found.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_without_scripts_a_report_says_so_and_still_gives_its_answer(browser, llama):
    with opened(browser, llama, scripts=False) as found:
        text = found.page.inner_text("main")
        assert "Fits: every stage within 73.14 GiB" in text
        assert "drawn by JavaScript, which is off here" in text
        assert "tp 8 · h100-80gb · modelled, not measured" in text
        assert re.search(r"[\d,]+ tokens/s on 1,024 GPUs, \d+ TFLOP/s per GPU, MFU [\d.]+%", text)


def test_a_step_of_65536_events_can_be_moved_in(browser, tmp_path):
    path = tmp_path / "long.html"
    path.write_text(html(long_step()), encoding="utf-8")
    with opened(browser, path, width=400) as found:
        assert found.ask("stages.reduce((sum, stage) => sum + stage.count, 0)") == 65_536
        found.over("#pipeline", 0.5, 0.5)
        found.page.mouse.wheel(0, -400)
        assert found.ask(SIDEWAYS) == 0
        assert found.said == []


def test_the_strip_opens_as_a_picture_of_its_own(browser, reports, tmp_path):
    path = tmp_path / "strip.svg"
    plan = Plan.load(reports / "llama31-405b.plan.json")
    path.write_text(strip_svg(plan), encoding="utf-8")
    choices = {replace(choice, group=1) for choice in plan.policy.layers}
    with opened(browser, path, scripts=False) as found:
        assert (found.asked, found.said) == ([], [])
        assert found.page.locator(".cell").count() == 126 + 2 + len(choices)
