"""Rows of measured runs: what is read, what is named, what is predicted."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measured import page
from benchmarks.measured.doubts import doubts
from benchmarks.measured.flags import FieldError, flags
from benchmarks.measured.megatron_tests import TEST_CASES, balanced, environment
from benchmarks.measured.prediction import Prediction, Stage
from benchmarks.measured.results import results
from benchmarks.measured.runs import Run, Unread
from benchmarks.measured.tables import read
from tests.benchmarks.csv_rows import rows, written

MOE_CASE = "moe/gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel"
DATA = Path(__file__).parents[2] / "benchmarks" / "data"
GOLDEN, B200 = DATA / "megatron_golden_memory.csv", DATA / "b200_measured.csv"
ADDED = DATA / "megatron_golden_memory_added.csv"
GRAPHS = "gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph (h100)"


def test_every_row_is_a_run_or_says_why_it_is_none():
    for path in (GOLDEN, B200, ADDED):
        found = list(read(path))
        assert len(found) == len(rows(path))
        for row in found:
            if isinstance(row, Unread):
                assert "tokenizer-model" in row.reason, row
            else:
                assert row.flags or row.uncovered, row
                assert row.measured[0].peak_bytes > 1 << 27


@pytest.mark.parametrize(
    ("path", "column", "value", "named"),
    [
        (GOLDEN, "mem_max_last", "lots", "mem_max_last: a whole number"),
        (GOLDEN, "platform", "dgx_x", "platform: 'dgx_x'"),
        (GOLDEN, "all_args_json", "{", "all_args_json: "),
        (GOLDEN, "all_args_json", '{"vocab-file": "mine.json"}', "mine.json is no tokenizer"),
        (GOLDEN, "all_args_json", '{"vocab-size": 9, "bf16": [1]}', "--bf16: a number"),
        (GOLDEN, "all_args_json", '{"vocab-size": "big"}', "--vocab-size: a whole number"),
        (B200, "model", "gpt5", "model: 'gpt5'"),
        (B200, "tp", "0", "tp: a whole number"),
        (B200, "max_allocated_mib_by_rank", "1 2", "2 peaks of 8 ranks"),
    ],
)
def test_a_bad_row_is_named_with_its_field(tmp_path, path, column, value, named):
    first, second = rows(path)[2:4]
    bad, good = read(written(tmp_path / "rows.csv", [{**first, column: value}, second]))
    assert isinstance(bad, Unread)
    assert named in bad.reason
    assert isinstance(good, Run)


def test_a_file_of_other_columns_is_refused_with_what_it_lacks(tmp_path):
    with pytest.raises(FieldError, match=r"lacks .*mem_max_last"):
        list(read(written(tmp_path / "rows.csv", [{"case": "a", "tier": "A"}])))


def test_rows_and_files_that_are_no_table_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    header = ",".join(rows(GOLDEN)[0])
    path.write_text(f"{header}\nA,gpt/short\n{header},more\n", encoding="utf-8-sig")
    short, long = read(path)
    assert short.reason == "platform: the row ends before it"
    assert long.reason == "1 more cells than columns"
    path.write_text(header, encoding="utf-16")
    with pytest.raises(FieldError, match=r"rows\.csv: no CSV in UTF-8"):
        list(read(path))


def test_flags_are_those_that_the_shell_would_read():
    given = {
        "layout": "Et*3\\\\|(tt\\\\|)",
        "schedule": "0:384 200B:768",
        "modules": "[a b]",
        "sizes": "2 2",
        "off": False,
        "on": True,
        "save": "${WHERE}",
    }
    read_flags = ("--layout", "Et*3|(tt|)", "--modules", "a", "b", "--on")
    assert flags(given) == (*read_flags, "--schedule", "0:384 200B:768", "--sizes", "2", "2")


def test_the_container_of_a_run_says_what_its_flags_do_not():
    row = {"case": "moe/some", "platform": "dgx_a100", "variant": "lts_dgx_a100"}
    row |= {"golden_date": "2025-10-21"}
    assert environment(row, {}) == (("flash_attn", True), ("te_version", "1.2"))
    assert ("flash_attn", False) in environment(row, {"deterministic-mode": True})
    assert environment(row | {"golden_date": "2026-01-16"}, {}) == ()
    path = f"{TEST_CASES}gpt/gpt3_mcore_te_tp2_pp2_cp2/golden_values_dev_dgx_gb200.json"
    row = {"case": "gpt/some", "platform": "dgx_gb200", "golden_path": path}
    split, newer = {"tensor-model-parallel-size": 2}, row | {"golden_date": "2026-08-19"}
    assert environment(row | {"golden_date": "2026-04-20"}, {}) == ()
    assert environment(newer, split) == (("torch_version", "2.12"),)
    assert ("keeps_microbatches", True) in environment(newer, {})
    row = {"case": "moe/some", "platform": "dgx_h100", "golden_date": "2026-04-14"}
    muon = {"optimizer": "dist_muon"}
    assert environment(row, muon) == (("use_layer_wise_param_layout", False),)
    assert environment(row | {"golden_date": "2026-08-19"}, muon) == ()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"moe-router-force-load-balancing": True}, "forced to be even"),
        ({"moe-router-load-balancing-type": "sinkhorn"}, "evened by Sinkhorn"),
        ({"moe-router-load-balancing-type": "aux_loss"}, "not evened"),
        ({"moe-aux-loss-coeff": "1e-2"}, "evened by training"),
        ({"moe-aux-loss-coeff": "[0 0.1]"}, "evened by training"),
        ({"moe-aux-loss-coeff": 0.1, "moe-router-load-balancing-type": "none"}, "not evened"),
        ({"moe-router-enable-expert-bias": True}, "evened by training"),
    ],
)
def test_what_makes_routing_even_is_read_from_the_flags(flags, said):
    assert balanced(flags) == said


def test_a_first_step_is_compared_where_a_run_begins_there(tmp_path):
    row = next(row for row in rows(GOLDEN) if row["mem_max_first"] and row["case"] in MOE_CASE)
    changed = [row, {**row, "variant": "dev_2nd"}]
    fresh, resumed = read(written(tmp_path / "rows.csv", changed))
    assert fresh.first_step_bytes == int(row["mem_max_first"])
    assert resumed.first_step_bytes is None
    found = Stage(10**10, "m", 2 * fresh.first_step_bytes, {"static": fresh.between_steps_bytes})
    data = results([(run, Prediction((found,), 8)) for run in (fresh, resumed)], [])
    line = next(x for x in page.text(data).splitlines() if x.startswith("| MoE, first step"))
    assert "| 1 | 100.00% |" in line


def test_what_is_not_covered_stands_among_the_rows_with_its_reason():
    runs = [row for row in read(GOLDEN) if isinstance(row, Run) and row.uncovered][:1]
    unread = Unread("broken row", "B", "tp: a whole number is needed")
    text = page.rows(results([(runs[0], None)], [unread]))
    for expected in (runs[0].name, runs[0].uncovered, "broken row", unread.reason):
        assert expected in text


def test_of_runs_of_equal_flags_the_newest_is_judged_and_a_run_of_another_model_is_not():
    found = [row for row in read(GOLDEN) if isinstance(row, Run) and not row.uncovered]
    why = doubts([(run, None) for run in found])
    assert 1 <= sum(map(bool, why)) <= len(found) // 40
    causes = {"container": 1, "#2236": 1, "265963072": 5, "that of loading": 2}
    for cause, number in causes.items():
        assert sum(cause in reason for reason in why) == number, cause
    assert sum(map(bool, why)) == sum(causes.values())
    (leaked,) = [run.name for run, reason in zip(found, why, strict=True) if "#2236" in reason]
    assert leaked == "gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4 (a100)"
    run = next(run for run in found if run.between_steps_bytes and len(run.worlds) == 1)
    for factor, expected in ((1, ""), (3, "another model")):
        static = factor * run.between_steps_bytes
        (reason,) = doubts([(run, Prediction((Stage(static, "m", None, {"static": static}),), 8))])
        assert reason.endswith(expected)
        assert bool(reason) == bool(expected)
    unsaid = next(run for run in found if len(run.worlds) > 1 and run.between_steps_bytes)
    static = unsaid.between_steps_bytes * 11 // 10
    (reason,) = doubts([(unsaid, Prediction((Stage(static, "m", None, {"static": static}),), 8))])
    assert "is not in the row" in reason


def test_values_that_another_tests_file_has_to_the_last_digit_are_not_judged():
    found = (row for row in read(ADDED) if isinstance(row, Run) and not row.uncovered)
    copied = next(run for run in found if run.first_step_bytes and run.step_ms)
    more = replace(copied, name="with more", flags=(*copied.flags, "--num-query-groups", "4"))
    slower = replace(more, name="slower", step_ms=2 * copied.step_ms)
    why = doubts([(run, None) for run in (copied, more, slower)])
    assert [bool(reason) for reason in why] == [False, True, False]
    assert f"those of {copied.name}, which has no --num-query-groups:" in why[1]


def test_added_rows_are_of_other_runs_than_those_that_parameters_were_fitted_on():
    paths = [{row["golden_path"] for row in rows(path)} for path in (GOLDEN, ADDED)]
    assert not paths[0] & paths[1]
    assert all(row.added for row in read(ADDED) if isinstance(row, Run))
    assert not any(row.added for row in read(GOLDEN) if isinstance(row, Run))


def test_a_peak_that_only_the_first_step_had_is_not_judged():
    named = "gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion (a100)"
    runs = [row for row in read(ADDED) if isinstance(row, Run) and row.name == named]
    static = {"static": runs[0].between_steps_bytes}
    found = Prediction((Stage(1_764_363_756, "m", 1_583_373_804, static),), 8)
    why = doubts([(run, found) for run in runs])
    once = [run.first_step_bytes == run.measured[0].peak_bytes for run in runs]
    assert {True, False} == {*once}
    assert [bool(reason) for reason in why] == once


def test_where_a_file_says_which_layers_are_quantised_both_bounds_are_told():
    run = next(r for r in read(GOLDEN) if isinstance(r, Run) and r.flags_without_quantising)
    assert "--fp4-format" in run.flags
    assert "--te-precision-config-file" not in run.flags
    assert not any("fp4" in flag for flag in run.flags_without_quantising)
    assert run.step_ms is None
    found = Stage(10**10, "m", None, {"static": run.between_steps_bytes})
    none = Stage(12 * 10**9, "m", None, {})
    (reason,) = doubts([(run, Prediction((found,), 64, without_quantising=(none,)))])
    assert reason.endswith("with none it would be 12.000 GB")


HAS_PARSER = importlib.util.find_spec("megatron.training") is not None


@pytest.mark.skipif(not HAS_PARSER, reason="this wheel of megatron-core has no flags")
@pytest.mark.parametrize(
    ("path", "name", "bound"),
    [
        (B200, "llama3_70b_l12_tp4_pp1_dp2_mbc4_cef", 0.002),
        (B200, "llama3_70b_l12_tp1_cp8_pp1_dp1_seq32768_mbc4_cef", 0.002),
        (GOLDEN, "gpt3_7b_tp1_pp4_memory_speed (gb200)", 0.004),
        (ADDED, GRAPHS, 0.01),
    ],
)
def test_one_run_of_each_family_is_predicted(path, name, bound):
    from benchmarks.measured.__main__ import case
    from benchmarks.measured.prediction import predicted

    run = next(row for row in read(path) if row.name == name)
    data = results([(run, predicted(case(run)))], [])
    assert not data["uncovered"]
    for point in data["points"]:
        assert abs(point["error"]) <= bound, json.dumps(point)


def test_the_page_and_its_rows_are_the_results():
    results_path = DATA.parent / "results" / "measured.json"
    data = json.loads(results_path.read_text(encoding="utf-8"))
    written = (DATA.parents[1] / "docs" / "measured-runs.md").read_text(encoding="utf-8")
    assert page.text(data) == written
    assert page.rows(data) == results_path.with_suffix(".md").read_text(encoding="utf-8")
