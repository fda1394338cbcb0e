"""Parts 1, 2, 3, 5, 9 and 10: what trains in this process. Every item is saved as it is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.cases import OFFLOADING
from benchmarks.gpu.contest import Contest, Peak
from benchmarks.gpu.mixes import random_policies
from benchmarks.gpu.published import BUDGET_FRACTION
from benchmarks.gpu.results import Ledger, between
from megatron_autorecompute.compare.comparison import needless
from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile

FULL, GROUPS = "megatron:uniform/1", "megatron:uniform/2"
SELECTIVE = "megatron:selective[core_attn]"
BUDGETS = 8
POLICIES = 40


def autodist(contest: Contest, ledger: Ledger, rounds: int) -> None:
    """Part 1: the document's experiment, under a limit that the allocator enforces."""
    peak = _peaks(contest, ledger)
    free = {text: peak(f"free/{text}", text) for text in ("megatron:none", SELECTIVE, FULL)}
    budget = ledger.item(
        "budget_bytes",
        lambda: between(
            free[FULL]["allocated_bytes"], free[SELECTIVE]["allocated_bytes"], BUDGET_FRACTION
        ),
    )
    _enforce(budget)
    limited = {text: peak(f"limited/{text}", text) for text in (SELECTIVE, FULL)}
    tried = _searched(contest, ledger, budget)
    profile_seconds = _timed(ledger, "profile", lambda: _profile(contest))
    plan_seconds = _timed(
        ledger, "ours", lambda: contest.plan(_read(ledger.section.items["profile"]), budget)
    )
    ledger.item(
        "search_s",
        lambda: {"manual": _seconds(tried), "ours": _rounded(profile_seconds + plan_seconds)},
    )
    rows = {
        "full": FULL,
        "manual": _best(tried, budget),
        "ours": ledger.section.items["ours"]["value"]["policy"],
    }
    rows |= {"selective": SELECTIVE} if Peak(**limited[SELECTIVE]).fits(budget) else {}
    ledger.item("rows", lambda: rows)
    for number in range(rounds):
        ledger.item(f"round/{number}", lambda: _by_row(contest, rows))


def curve(contest: Contest, ledger: Ledger, rounds: int) -> None:
    """Part 2: ours against the best of Megatron's settings at every budget from full to none."""
    peak = _peaks(contest, ledger)
    tried = {text: peak(f"manual/{text}", text) for text in contest.job.own_settings()}
    ledger.item("left_out", contest.job.left_out)
    profile = _read({"value": ledger.item("profile", lambda: _profile(contest))})
    low, high = tried[FULL]["allocated_bytes"], tried["megatron:none"]["allocated_bytes"]
    for number in range(BUDGETS):
        budget = between(low, high, number / (BUDGETS - 1))
        if f"budget/{number}" in ledger.section.items:
            continue
        timed = _timed_within(contest, ledger, tried, budget)
        ledger.item(
            f"budget/{number}",
            lambda budget=budget, timed=timed: _duel(contest, profile, timed, budget, rounds),
        )


def _duel(
    contest: Contest, profile: Profile, tried: dict[str, Any], budget: int, rounds: int
) -> dict[str, Any]:
    manual = _best(tried, budget)
    try:
        ours = contest.plan(profile, budget)
    except InfeasibleError as error:
        return {"budget_bytes": budget, "manual": manual, "infeasible": str(error)}
    times = contest.in_turns([manual, ours["policy"]], rounds)
    return {
        "budget_bytes": budget,
        "manual": manual,
        "manual_bytes": tried[manual]["allocated_bytes"],
        "manual_ms": times[manual],
        "ours": ours,
        "ours_ms": times[ours["policy"]],
    }


def fidelity(contest: Contest, ledger: Ledger, rounds: int) -> None:
    """Part 3: predicted against measured peak and step time of random mixed policies, and torch's
    memory history of one plan against its timeline."""
    profile = _read({"value": ledger.item("profile", lambda: _profile(contest))})
    rest_ms = ledger.item("rest_ms", lambda: contest.rest_ms(profile))

    def compared(text: str) -> dict[str, Any]:
        cost, peak = contest.cost(profile, contest.policy(text)), contest.peak(text)
        return {
            **asdict(peak),
            "predicted_bytes": cost.stages[0].peak.bytes,
            "predicted_ms": cost.step_ms + rest_ms,
            "step_ms": [] if peak.out_of_memory else contest.times_ms(text, rounds + 1)[1:],
        }

    texts = [policy.format() for policy in random_policies(profile, POLICIES)]
    for number, text in enumerate(texts):
        ledger.item(f"policy/{number}", lambda text=text: compared(text))
    folder = ledger.results.path.parent
    ledger.item("memory_history", lambda: contest.record_memory(profile, folder))


def overhead(contest: Contest, ledger: Ledger, rounds: int) -> None:
    """Part 5: Megatron's strategies run by our forward, against Megatron's own path."""
    half = contest.case.shape.num_layers // 2
    for text in ("megatron:none", SELECTIVE, FULL, GROUPS, f"megatron:block/{half}"):
        ours = contest.policy(text).format()
        ledger.item(
            f"strategy/{text}",
            lambda text=text, ours=ours: _pair(contest.in_turns([text, ours], 4 * rounds)),
        )


def checkpoints(contest: Contest, ledger: Ledger, rounds: int) -> None:
    """Part 10: Megatron's checkpoints and ours in turns, with what each keeps: the same bytes rerun
    less, and choices that Megatron lacks."""
    peak = _peaks(contest, ledger)
    choices = (str(c) for c in contest.choices() if c != LayerPolicy())
    texts = ["megatron:none", FULL, GROUPS, *choices]
    for text in texts:
        peak(f"peak/{text}", text)
    ledger.item("times", lambda: contest.in_turns(texts, 4 * rounds))


def offload(contest: Contest, ledger: Ledger, rounds: int) -> None:
    """Part 9: what offload takes off the device, and what its copies cost; the host's link."""
    ledger.item("link", lambda: link_rates(contest.job.on_cuda))
    # Off CUDA nothing leaves, and a dry run has other layers.
    texts = OFFLOADING[contest.case.name][2] if contest.job.on_cuda else ("none", "full")
    for number, text in enumerate([*texts, texts[0]]):  # the first one again: what drifted
        ledger.item(f"policy/{number}", lambda text=text: contest.settled(text, rounds))


def link_rates(on_cuda: bool, copied_bytes: int = 1 << 30, times: int = 5) -> dict[str, Any]:
    """GB/s between the device and pinned host memory: each way alone, then both at once."""
    if not on_cuda:
        return {}
    device = [torch.empty(copied_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(copied_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(*ways: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for way in ways:
            with torch.cuda.stream(streams[way]):
                source, target = (device, host) if way == 0 else (host, device)
                target[way].copy_(source[way], non_blocking=True)
        torch.cuda.synchronize()
        return copied_bytes / (time.perf_counter() - begin) / 1e9

    rate(0, 1)
    ways = {"to_host": (0,), "to_device": (1,), "each_of_both": (0, 1)}
    return {name: statistics.median(rate(*way) for _ in range(times)) for name, way in ways.items()}


def _pair(times: dict[str, list[float]]) -> dict[str, Any]:
    (_, megatron_ms), (ours, ours_ms) = times.items()
    return {"policy": ours, "megatron_ms": megatron_ms, "ours_ms": ours_ms}


# --- shared by the parts --------------------------------------------------------------------------


def _peaks(contest: Contest, ledger: Ledger) -> Callable[[str, str], dict[str, Any]]:
    return lambda name, text: ledger.item(name, lambda: asdict(contest.peak(text)))


def _enforce(budget_bytes: int) -> None:
    """From now on torch may reserve no more than the budget; what needs more runs out of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(budget_bytes / total)


def _searched(contest: Contest, ledger: Ledger, budget: int) -> dict[str, dict[str, Any]]:
    """Peak and times of Megatron's own settings, one after the other as a person would.

    What reruns more than a setting within the budget is passed over, see `comparison.needless`.
    """
    fitting: dict[str, RecomputePolicy] = {}
    tried: dict[str, dict[str, Any]] = {}
    passed_over = dict(contest.job.left_out())

    def run(text: str) -> dict[str, Any]:
        peak = contest.peak(text)
        times = contest.times_ms(text) if peak.fits(budget) else []
        return {**asdict(peak), "step_ms": times}

    for text in contest.job.own_settings():
        if reason := needless(contest.policy(text), fitting):
            passed_over[text] = reason
            continue
        tried[text] = ledger.item(f"manual/{text}", lambda text=text: run(text))
        if tried[text]["step_ms"]:
            fitting[text] = contest.policy(text)
    ledger.item("not_tried", lambda: passed_over)
    return tried


def _timed_within(
    contest: Contest, ledger: Ledger, tried: dict[str, dict[str, Any]], budget: int
) -> dict[str, dict[str, Any]]:
    """The settings within a budget with their times, without those that rerun more than another."""
    fitting: dict[str, RecomputePolicy] = {}
    timed = {}
    for text, peak in tried.items():
        policy = contest.policy(text)
        if Peak(**peak).fits(budget) and not needless(policy, fitting):
            fitting[text] = policy
            times = ledger.item(f"manual_ms/{text}", lambda text=text: contest.times_ms(text))
            timed[text] = {**peak, "step_ms": times}
    return timed


def _best(tried: dict[str, dict[str, Any]], budget: int) -> str:
    """The fastest setting within the budget, as the manual search would pick it."""
    fitting = {
        text: statistics.median(found["step_ms"])
        for text, found in tried.items()
        if found["step_ms"] and found["allocated_bytes"] <= budget
    }
    return min(fitting, key=fitting.__getitem__)


def _seconds(tried: dict[str, dict[str, Any]]) -> float:
    """What the manual search took: peaks and timed steps."""
    return _rounded(sum(t["seconds"] + sum(t["step_ms"]) / 1e3 for t in tried.values()))


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _profile(contest: Contest) -> Any:
    """A profile as it goes into the results: the text of its own file format."""
    return contest.profile().to_json()


def _read(item: dict[str, Any]) -> Profile:
    return Profile.from_json(item["value"])


def _timed(ledger: Ledger, name: str, make: Callable[[], Any]) -> float:
    """Seconds that making an item took, whenever that was."""

    def timed() -> dict[str, Any]:
        begin = time.perf_counter()
        return {"value": make(), "seconds": time.perf_counter() - begin}

    return float(ledger.item(name, timed)["seconds"])


def _by_row(contest: Contest, rows: dict[str, str]) -> dict[str, float]:
    times = contest.in_turns(list(dict.fromkeys(rows.values())), 1)
    return {name: times[text][0] for name, text in rows.items()}
