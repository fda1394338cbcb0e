"""Pages from the results file alone: one Markdown file a model, `<model>_<hardware>_<date>.md`.

    python -m benchmarks.gpu.page benchmarks/results/gpu/results.json

Pure Python, so that pages can be made again anywhere. What has no figure says "not yet measured".
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import published
from benchmarks.gpu.results import OUTCOMES, Results, Section, ratios, spread
from megatron_autorecompute.errors import AutorecomputeError
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.units import GIB

NOT_YET = "not yet measured"
TITLES = {
    1: "The Autodist experiment",
    2: "The curve: ours against the best manual setting at every budget",
    3: "Fidelity: predicted against measured",
    4: "Equality, bit by bit",
    5: "Overhead of our forward running Megatron's strategies",
    6: "`--recompute-policy auto` in the job",
    7: "Upstream's own tests",
    8: "Jobs by their flags, predicted without a device",
    9: "Offload: bytes that leave, and what their copies cost",
    10: "Checkpoints that rerun nothing that nobody reads",
    11: "The stages of a real pipeline, one at a time",
}


def write(results: Results, folder: Path) -> list[Path]:
    """Write a page for every model in the results; their paths."""
    models = dict.fromkeys(section.model for section in results.sections.values())
    paths = []
    for model in models:
        path = folder / name_of(model, results)
        write_atomically(render(results, model), path)
        paths.append(path)
    return paths


def name_of(model: str, results: Results) -> str:
    """`gpt3-760m-48l_nvidia-h200_2026-11-21.md`; a dry run says so."""
    hardware = re.sub(r"[^a-z0-9]+", "-", results.machine["device"].lower()).strip("-")
    return f"{model}_{'tiny-' * results.tiny}{hardware}_{results.date}.md"


def render(results: Results, model: str) -> str:
    """The page of one model."""
    sections = [s for s in results.sections.values() if s.model == model]
    lines = [f"# {model} on {results.machine['device']}, {results.date}", ""]
    if results.tiny:
        lines += ["A dry run at a tiny size: it shows that the benchmark runs, nothing else.", ""]
    for section in sorted(sections, key=lambda section: section.part):
        lines += [f"## {section.part}. {TITLES[section.part]}", ""]
        if not section.complete:
            lines += [f"Not complete{f' ({section.stopped})' if section.stopped else ''}.", ""]
        lines += [*_BODIES[section.part](section), ""]
    notes = results.path.with_name(f"{model}.notes.md")
    if notes.exists():
        lines += ["## Notes", "", notes.read_text(encoding="utf-8").strip(), ""]
    lines += ["## Configuration and versions", ""]
    everywhere = [(name, value, "all") for name, value in results.machine.items()]
    lines += table(("what", "value", "parts"), [*_configurations(sections), *everywhere])
    return "\n".join(lines) + "\n"


def _configurations(sections: Sequence[Section]) -> list[tuple[str, str, str]]:
    """Every setting once, with the parts that were measured with it."""
    parts: dict[tuple[str, str], list[int]] = {}
    for section in sections:
        for name, value in section.configuration.items():
            parts.setdefault((name, str(value)), []).append(section.part)
    return [(*setting, ", ".join(map(str, sorted(those)))) for setting, those in parts.items()]


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table."""
    body = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}", *body]


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.3f}"


def _ms(times: Sequence[float]) -> str:
    """Median with the distance between the quartiles."""
    return f"{statistics.median(times):.1f} ± {spread(times):.1f}" if times else "-"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.2f}%"


def _met(claim: str, met: bool) -> str:
    return f"{claim}: **{_yes(met)}**"


# --- one function a part --------------------------------------------------------------------------


def _autodist(section: Section) -> list[str]:
    items = section.items
    rounds = _numbered(items, "round")
    published_rows = [
        (
            f"{row.name} (published)",
            f"{1e3 * row.step_s:.0f}",
            f"{row.peak_gb:.2f} GB",
            "-",
            "-" if row.search_s is None else f"{row.search_s:.0f}",
            "OOM" if row.over else "yes",
        )
        for row in published.ROWS
    ]
    headings = ("strategy", "step ms", "allocated GiB", "reserved GiB", "search s", "fits")
    if not rounds:
        return [NOT_YET, "", *table(headings, published_rows)]
    times = {name: [one[name] for one in rounds] for name in items["rows"]}
    peaks = {
        "selective": items[f"limited/{_SELECTIVE}"],
        "full": items[f"limited/{_FULL}"],
        "manual": items[f"manual/{items['rows']['manual']}"],
        "ours": items["ours"]["value"],
    }
    ours = [
        (
            f"{name}: `{_short(peak['policy'])}`",
            _ms(times.get(name, [])),
            _gib(peak["allocated_bytes"]),
            _gib(peak["reserved_bytes"]),
            items["search_s"].get(name, "-"),
            "OOM"
            if peak["out_of_memory"]
            else _yes(peak["allocated_bytes"] <= items["budget_bytes"]),
        )
        for name, peak in peaks.items()
    ]
    less = 1 - statistics.median(ratios(times["ours"], times["manual"]))
    fits = not peaks["ours"]["out_of_memory"] and (
        peaks["ours"]["allocated_bytes"] <= items["budget_bytes"]
    )
    return [
        f"Budget {_gib(items['budget_bytes'])} GiB, {published.BUDGET_FRACTION:.2f} of the way from"
        " full to selective, enforced on the allocator on CUDA. Time saved is 1 - ours/manual, the "
        f"document's own measure: its rows give {100 * published.SAVED:.1f}%.",
        "",
        _met(
            f"- Time saved {100 * less:.2f}% (median of {len(rounds)} rounds), aim 8%", less >= 0.08
        ),
        _met("- Ours within the budget", fits),
        _met(f"- Search {items['search_s']['ours']} s, aim 30 s", items["search_s"]["ours"] < 30),
        "",
        *table(headings, [*ours, *published_rows]),
    ]


_FULL, _SELECTIVE = "megatron:uniform/1", "megatron:selective[core_attn]"


def _curve(section: Section) -> list[str]:
    budgets = _numbered(section.items, "budget")
    if not budgets:
        return [NOT_YET]
    headings = (
        "budget GiB",
        "best manual",
        "manual ms",
        "ours ms",
        "ours/manual (± quartiles)",
        "ours GiB",
        "fits",
        "policy",
    )
    slower = [duel for duel in budgets if "infeasible" in duel or _slower(duel)]
    over = [duel for duel in budgets if "infeasible" not in duel and not duel["ours"]["fits"]]
    return [
        _met(
            "Never slower than the best manual setting (median ratio at most 1 within its spread), "
            f"{len(budgets)} budgets",
            not slower,
        ),
        "",
        _met("Always within the budget", not over),
        "",
        *table(headings, [_duel(duel) for duel in budgets]),
    ]


def _slower(duel: dict[str, Any]) -> bool:
    pairs = ratios(duel["ours_ms"], duel["manual_ms"])
    return statistics.median(pairs) - spread(pairs) > 1


def _duel(duel: dict[str, Any]) -> tuple[Any, ...]:
    start = (_gib(duel["budget_bytes"]), f"`{duel['manual']}`")
    if "infeasible" in duel:
        return (*start, "-", "-", "-", "-", "no plan", duel["infeasible"])
    pairs, ours = ratios(duel["ours_ms"], duel["manual_ms"]), duel["ours"]
    ratio = f"{statistics.median(pairs):.4f} ± {spread(pairs):.4f}"
    shown = f"`{_short(ours['policy'])}`"
    times = (_ms(duel["manual_ms"]), _ms(duel["ours_ms"]))
    return (*start, *times, ratio, _gib(ours["allocated_bytes"]), _yes(ours["fits"]), shown)


def _fidelity(section: Section) -> list[str]:
    every = _numbered(section.items, "policy")
    found = [one for one in every if not one["out_of_memory"]]
    if not found:
        return [NOT_YET]
    bytes_off = [one["predicted_bytes"] / one["allocated_bytes"] - 1 for one in found]
    ms_off = [one["predicted_ms"] / statistics.median(one["step_ms"]) - 1 for one in found]
    worst = sorted(zip(bytes_off, ms_off, found, strict=True), key=lambda row: -abs(row[0]))
    return [
        f"{len(found)} policies; {len(every) - len(found)} more ran out of memory and have no "
        "figures. Errors of the prediction, absolute:",
        "",
        *table(
            ("", "median", "worst", "aim (median, worst)", "met"),
            [
                ("peak allocated", *_off(bytes_off, 0.01, 0.03)),
                ("step time", *_off(ms_off, 0.02, 0.05)),
            ],
        ),
        "",
        *table(
            ("policy", "peak off", "time off", "allocated GiB", "reserved GiB", "step ms"),
            [
                (
                    f"`{_short(one['policy'])}`",
                    _percent(peak),
                    _percent(ms),
                    _gib(one["allocated_bytes"]),
                    _gib(one["reserved_bytes"]),
                    _ms(one["step_ms"]),
                )
                for peak, ms, one in worst
            ],
        ),
    ]


def _off(errors: Sequence[float], median_aim: float, worst_aim: float) -> tuple[str, ...]:
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    return (
        f"{100 * median:.2f}%",
        f"{100 * worst:.2f}%",
        f"{100 * median_aim:.0f}%, {100 * worst_aim:.0f}%",
        _yes(median <= median_aim and worst <= worst_aim),
    )


def _equality(section: Section) -> list[str]:
    known = {test: section.items.get(f"test/{test}") for test in section.items.get("tests", [])}
    said = Counter((outcome or NOT_YET).partition(":")[0] for outcome in known.values())
    if not said["passed"] and not said["failed"]:
        return [NOT_YET]
    return [
        ", ".join(f"{said[word]} {word}" for word in (*OUTCOMES, NOT_YET)) + ".",
        "",
        *table(("test", "outcome"), [(test, _shown(outcome)) for test, outcome in known.items()]),
    ]


def _shown(outcome: str | None) -> str:
    """A skipped test has proved nothing."""
    word, _, reason = (outcome or "").partition(":")
    return f"{NOT_YET} ({word}:{reason})" if word == "skipped" else outcome or NOT_YET


def _overhead(section: Section) -> list[str]:
    named = {k: v for k, v in section.items.items() if k.startswith("strategy/")}
    if not named:
        return [NOT_YET]
    rows, within = [], []
    for name, pair in named.items():
        pairs = ratios(pair["ours_ms"], pair["megatron_ms"])
        ratio = statistics.median(pairs)
        within.append(abs(ratio - 1) <= 0.005)
        times = (_ms(pair["megatron_ms"]), _ms(pair["ours_ms"]))
        shown = f"{ratio:.4f} ± {spread(pairs):.4f}"
        rows.append((f"`{name.removeprefix('strategy/')}`", *times, shown, _yes(within[-1])))
    headings = ("strategy", "Megatron ms", "ours ms", "ours/Megatron", "met")
    return [
        _met(f"Every median ratio within 1.00 ± 0.005, {len(rows)} strategies", all(within)),
        "",
        *table(headings, rows),
    ]


def _auto(section: Section) -> list[str]:
    if "auto" not in section.items:
        return [NOT_YET]
    job, plain = section.items["auto"], section.items["without us"]
    same = job["losses"] == plain["losses"]
    return [
        *table(
            ("what", "value"),
            [
                ("steps", len(job["losses"])),
                (
                    "losses and gradient norms identical to a run without us, digit by digit",
                    _yes(same and bool(job["losses"])),
                ),
                ("budget GiB", f"{job['budget_gib']:.3f}"),
                ("ran out of memory", _yes(job["out_of_memory"])),
                ("wall time lost to measuring and deciding, s", f"{job['lost_s']:.2f}"),
                ("step once decided, ms", _ms(job["settled_ms"])),
                ("step without us under full, ms", _ms(plain["step_ms"][1:])),
            ],
        ),
        "",
        "```",
        *job["said"],
        "```",
    ]


def _upstream(section: Section) -> list[str]:
    ways = [way for way in ("without us", "idle", "through ours") if way in section.items]
    if not ways:
        return [NOT_YET]
    forwards = section.items.get("forwards, through ours", 0)
    every = sorted({test for way in ways for test in section.items[way]})
    outcomes = [[section.items[way].get(test, "missing") for way in ways] for test in every]
    differing = [
        (test, *row) for test, row in zip(every, outcomes, strict=True) if len(set(row)) > 1
    ]
    counts = [
        (
            way,
            len(section.items[way]),
            *(list(section.items[way].values()).count(o) for o in ("passed", "skipped", "failed")),
        )
        for way in ways
    ]
    return [
        *table(("way", "tests", "passed", "skipped", "failed"), counts),
        "",
        f"Forwards of blocks that ran our policies: {forwards}.",
        "Every test has the same outcome in all ways." if not differing else "Differing:",
        *(table(("test", *ways), differing) if differing else []),
    ]


def _by_flags(section: Section) -> list[str]:
    jobs = {k: v for k, v in section.items.items() if k.startswith("job/")}
    rows = []
    for name, job in jobs.items():
        found = section.items.get(name.replace("job/", "predicted/"), {})
        times = job["step_ms"][2:]
        if job["out_of_memory"]:
            rows.append((name.removeprefix("job/"), "out of memory", *["-"] * 6))
            continue
        off = found["peak_bytes"] / job["peak_bytes"] - 1 if "peak_bytes" in found else None
        rows.append(
            (
                name.removeprefix("job/"),
                _gib(job["peak_bytes"]),
                _gib(found.get("peak_bytes")),
                found.get("uncovered", NOT_YET) if off is None else f"{100 * off:+.3f}%",
                _gib(settled_static(job)),
                _gib(found.get("static_bytes")),
                _ms(times),
                _gib(job["outside_torch_bytes"]),
            )
        )
    if not rows:
        return [NOT_YET]
    return [
        "Measured by torch in Megatron's own job, without this package; predicted from the same "
        "flags by `python -m benchmarks.gpu.predict`, without a device. Static: allocated before "
        "a step's first forward, once the optimizer has its state.",
        "",
        *table(
            (
                "job",
                "peak GiB",
                "predicted",
                "off",
                "static GiB",
                "predicted",
                "step ms",
                "outside torch GiB",
            ),
            rows,
        ),
    ]


def settled_static(job: dict[str, Any]) -> int:
    """Bytes before the last step's first forward."""
    steps = len(job["losses"])
    before: list[int] = job["before_forwards_bytes"]
    return before[-(len(before) // steps)] if before and steps else 0


def _offload(section: Section) -> list[str]:
    found = _numbered(section.items, "policy")
    if not found:
        return [NOT_YET]
    link = section.items["link"]
    rows = []
    for number, one in enumerate(found):
        if one["out_of_memory"]:
            rows.append((f"`{one['policy']}`", "out of memory", *["-"] * 6))
            continue
        taken = one["peak_bytes"] - one["at_rest_bytes"]
        predicted = section.items.get(f"predicted/{number}", {})
        rows.append(
            (
                f"`{one['policy']}`",
                _gib(taken),
                _gib(predicted.get("taken_bytes")),
                _percent(predicted["taken_bytes"] / taken - 1) if predicted else NOT_YET,
                _gib(one["pinned_bytes"]),
                _ms(one["step_ms"]),
                f"{statistics.median(one['step_ms']) / statistics.median(found[0]['step_ms']):.3f}",
                f"{predicted['times_none']:.3f}" if predicted else NOT_YET,
            )
        )
    return [
        f"Pinned memory and the device: {link.get('to_host', 0):.1f} GB/s out, "
        f"{link.get('to_device', 0):.1f} back, {link.get('each_of_both', 0):.1f} each way at once. "
        "Taken: the peak of a step above what is there when it begins. Predicted without a device "
        "by `python -m benchmarks.gpu.predict`. The first policy ran again at the end.",
        "",
        *table(
            (
                "policy",
                "taken GiB",
                "predicted",
                "off",
                "pinned GiB",
                "step ms",
                "times none",
                "predicted",
            ),
            rows,
        ),
    ]


def _checkpoints(section: Section) -> list[str]:
    times = section.items.get("times")
    if times is None:
        return [NOT_YET]
    none_ms = _lower_quartile(times["megatron:none"])
    rows = []
    for text, taken in times.items():
        peak = section.items[f"peak/{text}"]
        more = _lower_quartile(taken) - none_ms
        rows.append((f"`{text}`", _gib(peak["allocated_bytes"]), _ms(taken), f"{more:+.2f}"))
    said = "Lower quartiles of steps that took turns; `megatron:…` is Megatron's own path."
    return [said, "", *table(("policy", "peak GiB", "step ms", "over none ms"), rows)]


def _stages(section: Section) -> list[str]:
    plans, stages = section.items.get("plans", {}), _numbered(section.items, "stage")
    if not stages:
        return [NOT_YET]
    rows = [
        (
            number,
            name,
            *(_gib(one) for one in (plan["peak_bytes"][number], stage[name].get("peak_bytes"))),
            f"{plan['busy_ms'][number]:.0f}",
            "out of memory" if stage[name]["out_of_memory"] else f"{stage[name]['busy_ms']:.0f}",
        )
        for number, stage in enumerate(stages)
        for name, plan in plans.items()
    ]
    headings = ("stage", "policy", "predicted peak GiB", "GiB", "predicted busy ms", "ms")
    return [
        "Each stage ran alone in Megatron's own schedule, on its true shard. Communication is not "
        "in its times, nor the optimizer's states in its peaks; predictions have both.",
        "",
        *_steps(section.items),
        *table(headings, rows),
    ]


def _steps(items: dict[str, Any]) -> list[str]:
    """What a step takes by a replay of the measured times, once all stages have run."""
    if "steps" not in items:
        return [f"Steps: {NOT_YET}", ""]
    plans, steps = items["plans"], items["steps"]
    manual = next(iter(plans))
    rows = [
        (
            f"`{_short(plan['policy'])}`" if name == manual else name,
            f"{plan['step_ms']:.0f}",
            _percent(plan["step_ms"] / plans[manual]["step_ms"] - 1),
            f"{steps[name]:.0f}",
            _percent(steps[name] / steps[manual] - 1),
        )
        for name, plan in plans.items()
        if name in steps and manual in steps
    ]
    headings = ("policy", "predicted step ms", "over manual", "replayed ms", "over manual")
    return [*table(headings, rows), ""]


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


_BODIES: dict[int, Callable[[Section], list[str]]] = {
    1: _autodist,
    2: _curve,
    3: _fidelity,
    4: _equality,
    5: _overhead,
    6: _auto,
    7: _upstream,
    8: _by_flags,
    9: _offload,
    10: _checkpoints,
    11: _stages,
}


def _numbered(items: dict[str, Any], what: str) -> list[Any]:
    return [item for name, item in items.items() if name.startswith(f"{what}/")]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _short(policy: str) -> str:
    """A policy as it fits a cell."""
    return policy if len(policy) <= 80 else policy[:77] + "..."


def main(arguments: Sequence[str] | None = None) -> Iterator[Path]:
    """Make the pages of the named results files again, beside them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.page")
    parser.add_argument("results", nargs="+", type=Path, help="results.json of benchmarks.gpu.run")
    for path in parser.parse_args(arguments).results:
        yield from write(Results.load(path), path.parent)


if __name__ == "__main__":
    try:
        for written in main():
            print(written)
    except AutorecomputeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
