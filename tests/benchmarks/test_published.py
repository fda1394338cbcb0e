"""NVIDIA's published steps: which recipe a row is of, what cannot be read, what the page says."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.measured.flags import FieldError
from benchmarks.measured.runs import Unread
from benchmarks.measured.spread import Spread
from benchmarks.published import page, results, runs
from tests.benchmarks.csv_rows import rows, written

pytestmark = pytest.mark.any_version
NAME = "llama3_70b_pretrain_64gpu_h100_fp8cs_config"
RESULTS = runs.ROOT / "benchmarks" / "results" / "published_steps.json"
PAGE = runs.ROOT / "docs" / "published-steps.md"


def job(mbs=1, gbs=256, seq=8192, **sizes):
    """By the columns of the table."""
    known = {"tp": 4, "pp": 8, "vp": 5, **sizes}
    config = {runs.FIELDS[column]: size for column, size in known.items()}
    batches = {"micro_batch_size": mbs, "global_batch_size": gbs}
    return SimpleNamespace(config=config, seq_length=seq, **batches)


def all_runs():
    return runs.all_read(runs.PUBLISHED) + runs.all_read(runs.CARDS)


def same_releases(**changed):
    sizes = runs.sizes(job(**changed))
    own = runs.of_recipe(NAME, runs.all_read(runs.PUBLISHED))
    return [run.release for run in own if not run.others(sizes)]


def test_a_run_is_of_the_recipe_whose_sizes_and_batch_it_has_newest_first():
    assert same_releases() == ["26.04.01", "26.04", "26.02.01", "26.02"]
    for other in (
        *({"gbs": 128}, {"mbs": 2}, {"seq": 4096}),
        *({"tp": 8}, {"vp": None}, {"ep": 2}),
    ):
        assert not same_releases(**other), other


def test_bytes_ask_for_sizes_but_not_for_the_global_batch():
    newest = runs.of_recipe(NAME, runs.all_read(runs.PUBLISHED))[0]
    assert newest.of_sizes(runs.sizes(job(gbs=16)))
    assert not newest.of_sizes(runs.sizes(job(pp=4)))


def test_a_run_with_fsdp_is_of_no_recipe_without():
    name = "llama3_70b_pretrain_64gpu_gb200_fp8cs_config"
    own = runs.of_recipe(name, runs.all_read(runs.PUBLISHED))
    whole = job(mbs=2, tp=1, pp=1, vp=1)
    assert [run.others(runs.sizes(whole)) for run in own] == [["fsdp"]] * 4


def test_recipes_of_lora_are_named_peft():
    known = runs.all_read(runs.PUBLISHED)
    (run,) = runs.of_recipe("llama3_70b_peft_8gpu_h100_fp8cs_config", known)
    assert run.step_s == pytest.approx(32 * 4096 / 8 / 2643)


def test_a_later_number_is_a_newer_release():
    ordered = sorted(("26.04.01", "26.10", "26.04", "26.06"), key=runs.order)
    assert ordered == ["26.04", "26.04.01", "26.06", "26.10"]


def test_the_nearest_run_says_in_what_it_differs():
    sizes = runs.sizes(job(gbs=16, cp=2))
    nearest = runs.nearest(runs.of_recipe(NAME, runs.all_read(runs.PUBLISHED)), sizes)
    assert runs.unlike(nearest, sizes) == (
        "other sizes: the nearest published run (26.04.01) has cp 1, gbs 256, "
        "the recipe cp 2, gbs 16"
    )


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [
        ("release", "newest", "release: numbers as in 26.04.01"),
        ("task", "rl", "task: one of pretrain, sft, lora is needed, not 'rl'"),
        ("model", "", "model: a name as in recipes"),
        ("gpus", "0", "gpus: a whole number above 0"),
        ("gbs", "many", "gbs: a whole number above 0"),
        ("tp", "1.5", "tp: a whole number above 0 is needed, not '1.5'"),
        ("vp", "n/a", "vp: a whole number"),
        ("fsdp", "-1", "fsdp: a whole number above -1"),
        ("tokens_per_s_gpu", "nan", "tokens_per_s_gpu: a number above 0"),
        ("tokens_per_s_gpu", "0", "tokens_per_s_gpu: a number above 0"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_field(tmp_path, column, value, named):
    first, second = rows(runs.PUBLISHED)[:2]
    path = written(tmp_path / "rows.csv", [{**first, column: value}, second])
    bad, good = runs.read(path)
    assert isinstance(bad, Unread)
    assert named in bad.reason
    assert isinstance(good, runs.PublishedRun)
    with pytest.raises(FieldError, match=rf"line 2: {column}: "):
        runs.all_read(path)
    assert f"| line 2 | {bad.reason} |" in page.rows(results.results([], [], [bad]))


def test_rows_cut_short_and_other_tables_are_named(tmp_path):
    short = tmp_path / "short.csv"
    short.write_text(",".join(rows(runs.PUBLISHED)[0]) + "\n26.08,deepseek_v3\n")
    (bad,) = runs.read(short)
    assert bad.reason == "task: the row ends before it"
    with pytest.raises(FieldError, match=r"it lacks .*fsdp.*tokens_per_s_gpu"):
        list(runs.read(written(tmp_path / "rows.csv", [{"release": "26.08"}])))
    short.write_bytes(b"release\xff\n")
    with pytest.raises(FieldError, match="no CSV in UTF-8"):
        list(runs.read(short))


def found(recipe, gpu, family, predicted_s, *steps):
    published = [{"release": release, "step_s": step_s} for release, step_s in steps]
    said = {"setting": "none", "runs_with": "", "published": published}
    return {"recipe": recipe, "gpu": gpu, "family": family, "predicted_s": predicted_s, **said}


FOUND = [
    found("a_config", "h100-80gb", "dense", 11.0, ("26.08", 10.0), ("26.06", 22.0), ("26.02", 4.0)),
    found("b_config", "h100-80gb", "MoE", 4.0, ("26.06", 5.0)),
    found("c_config", "b200-180gb", "MoE", 12.0, ("26.08", 8.0), ("26.04", 16.0)),
    {"recipe": "d_config", "reason": "other | sizes"},
]


def test_statistics_are_those_by_hand():
    known = Spread(4, median=0.125, mean=0.25, percentile_90=0.75, worst=-0.75, signed_mean=-0.125)
    assert Spread.of([0.125, -0.75, 0.125, 0.0]) == known
    text = page.statistics(results.results(FOUND, []))
    assert text.splitlines()[2:] == [
        "| judges | b200 | MoE | 1 | 50.0% | 50.0% | +50.0% | +50.0% |",
        "| judges | b200 | all | 1 | 50.0% | 50.0% | +50.0% | +50.0% |",
        "| judges | h100 | MoE | 1 | 20.0% | 20.0% | -20.0% | -20.0% |",
        "| judges | h100 | dense | 1 | 10.0% | 10.0% | +10.0% | +10.0% |",
        "| judges | h100 | all | 2 | 15.0% | 15.0% | -20.0% | -5.0% |",
        "| judges | all | MoE | 2 | 35.0% | 35.0% | +50.0% | +15.0% |",
        "| judges | all | dense | 1 | 10.0% | 10.0% | +10.0% | +10.0% |",
        "| judges | all | all | 3 | 20.0% | 26.7% | +50.0% | +13.3% |",
    ]


def test_the_newest_release_is_judged_and_older_ones_are_a_range():
    text = page.rows(results.results(FOUND, []))
    line = "| 26.08 | 10.00 | 11.00 | +10.0% | 4.00 to 22.00 (26.02 to 26.06) |"
    assert f"| a | dense | judges | none |  {line}" in text
    assert "| 8.00 | 12.00 | +50.0% | 16.00 (26.04) |" in text
    assert "| other \\| sizes | 1 | d |" in text


def test_roles_are_told_apart_once_a_recipe_is_fitted(monkeypatch):
    assert 'no role is "fitted"' in " ".join(page.text(results.results(FOUND, [])).split())
    monkeypatch.setattr(results, "FITTED", ("b_config",))
    found = results.results(FOUND, [])
    assert "were fitted on 1 of these 3 rows" in page.text(found)
    text = page.rows(found)
    assert "| fitted | h100 | MoE | 1 | 20.0%" in text
    assert "| judges | h100 | all | 1 | 10.0%" in text


def test_a_recipe_that_changed_since_its_run_does_not_judge(monkeypatch):
    monkeypatch.setattr(page, "CHANGED", {"b_config": "EP overlap since"})
    monkeypatch.setattr(results, "CHANGED", page.CHANGED)
    found = results.results(FOUND, [])
    assert "| judges | all | all | 2 |" in page.text(found)
    text = page.rows(found)
    assert "| changed since | h100 | MoE | 1 | 20.0%" in text
    assert "| b | EP overlap since |" in text


def test_every_recipe_that_something_is_said_of_is_in_the_results():
    points = json.loads(RESULTS.read_text(encoding="utf-8"))["points"]
    known = {point["recipe"] for point in points}
    assert set(results.CHANGED) <= known
    assert set(results.FITTED) <= known - set(results.CHANGED)


def test_a_published_run_without_a_recipe_is_named():
    known = runs.all_read(runs.PUBLISHED)
    data = results.results([{"recipe": NAME, "reason": "x"}], known[:1] + known[-1:])
    lost = [each["recipe"] for each in data["uncovered"] if each["reason"] == results.NO_RECIPE]
    assert lost == sorted({run.recipe.rstrip("_") for run in known[:1] + known[-1:]})
    with pytest.raises(FieldError, match="'b200' in its name"):
        results.asked([NAME], known, "b200")
    assert results.asked([NAME, "other"], known) == [NAME]


def test_the_page_is_its_results_and_has_every_published_recipe():
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert page.text(data) == PAGE.read_text(encoding="utf-8")
    assert page.rows(data) == RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    known = all_runs()
    names = [each["recipe"] for each in (*data["points"], *data["uncovered"])]
    assert data["runs"] == len(known)
    for run in known:
        assert any(f"{name}_".startswith(run.recipe) for name in names), run.recipe
    assert all(each.get("reason") for each in data["uncovered"])


def test_published_seconds_of_the_results_are_those_of_the_rows():
    known = all_runs()
    for point in json.loads(RESULTS.read_text(encoding="utf-8"))["points"]:
        own = runs.of_recipe(point["recipe"], known)
        same = [run for run in own if not run.others(point["sizes"])]
        steps = [{"release": run.release, "step_s": round(run.step_s, 3)} for run in same]
        assert point["published"] == steps, point["recipe"]
        assert point["error"] == pytest.approx(point["predicted_s"] / same[0].step_s - 1, abs=0.001)
        assert point["role"] == results.role(point["recipe"])


CARDS = {
    "qwen3_8b_pretrain_16gpu_h100_bf16_config": (25.070320, 0.08),
    "deepseek_v3_pretrain_1024gpu_h100_bf16_config": (61.756130, 0.08),
    "gpt_oss_120b_pretrain_64gpu_gb200_bf16_config": (4.995630, 0.08),
}
"""By recipe: seconds, which are `last_10_steps_step_time_ms_avg` of its card, and the largest error
of the prediction."""


def test_the_tokens_of_a_card_are_those_of_its_step():
    found = {f"{run.recipe}config": run.step_s for run in runs.all_read(runs.CARDS)}
    assert found == pytest.approx({name: step for name, (step, _) in CARDS.items()}, rel=1e-6)


def test_the_step_of_every_card_is_predicted_within_its_bound():
    points = json.loads(RESULTS.read_text(encoding="utf-8"))["points"]
    errors = {point["recipe"]: point["error"] for point in points}
    for name, (_, largest) in CARDS.items():
        assert abs(errors[name]) <= largest, name
