"""Damaged files and flags for the command line, and what it may answer.

Of any input a command ends with 0, or with a code of docs/exit-codes.md and one message: one line,
below it perhaps indented ones that list what to correct. It shows no traceback, and takes at most
10 seconds of the processor.

    python -m tests.cli.fuzz --number 10000             # damaged profiles, plans, flags and jobs
    python -m tests.cli.fuzz --number 50 --only estimate    # jobs, the whole command: seconds each
"""

import argparse
import contextlib
import copy
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_autorecompute import json_records
from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import AutorecomputeError
from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.planner.plan import DIGEST

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "examples" / "profiles").glob("*.json"))
JOBS = sorted((ROOT / "megatron_autorecompute" / "examples").glob("*.yaml"))
CODES = {
    int(n) for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.M)
}
LIMIT_S = 10
ESTIMATE_LIMIT_S = 120
"""Building a model of many kinds of layers and running its choices takes a while."""
MEMORY_BYTES = 8 << 30

VALUES = [
    *(0, -1, 1, 2, 3, 5, 7, 100, 4096, 65536, 10**9, 2**31, 2**44, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 32.5, -1e-9, 1e-300, 1e15, 1e308, float("nan"), float("inf")),
    *(None, True, False, "", " ", "0", "-1", "64", "none", "full", "full/2", "full/0", "x" * 3000),
    *("selective[mlp]", "selective[]", "full*99999999999", "megatron:block/4", "auto", "@none"),
    *("\x1b[31mred\x1b[0m", "[red]", "[/]", "[/red]", ":smile:", "\u202eabc", "ä×≥", "a\nb", "\0"),
    *("silu", "relu", "fp8", "local", "Et*3|(tt|)*6mL", "Et*9999L", "(t*9999)*1666", "Et|*9999"),
    *([], [[]], {}, {"a": 1}, [0], [1, 2, 3], [None], ["full"], {"": {}}),
]
TEXTS = [
    *("0", "1", "2", "3", "4", "8", "-1", "1.5", "1000000000", "99999999999999999999", "9" * 5000),
    *("nan", "inf", "-inf", "1e400", "abc", "", " ", "-", "--", "30,40", "30,40,50,60", "1,2", ","),
    *("none", "full", "full/N", "full/2", "selective[mlp]", "selective[\x1b[31m]", "[/red]", "\0"),
    *("Et*3|(tt|)*6mL", "Et*80L", "Et*40|t*40L", "(t*9999)*1666", "E", "|" * 5000, "Et*99999999L"),
    *("absent.json", "/", "/dev/null", "x" * 300, "absent/p.json", "\ud800"),
]
LIKELY = ["1", "2", "3", "4", "8", "16", "1000000000", "30", "5", "none", "full", "full/N", "99"]
PROBLEM = [
    *("--pp", "--vp", "--num-microbatches", "--microbatch-group-size", "--imbalance-percentile"),
    *("--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage", "--only"),
    *("--pipeline-model-parallel-layout", "--profile"),
]
OWN = {"plan": ["--budget-gib", "--search-micro-batch"], "pareto": ["--points"]}
SWITCHES = [
    *("--overlap-moe-expert-parallel-comm", "--account-for-embedding-in-pipeline-split"),
    *("--account-for-loss-in-pipeline-split", "--search-layout", "--json", "--help", "--nonsense"),
]


@dataclass(frozen=True)
class Answer:
    """What a command said to one input."""

    code: int
    out: str
    err: str
    seconds: float
    raised: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.raised:
            return self.raised
        if self.code and self.code not in CODES:
            return f"exit code {self.code}"
        if self.code and not self._is_one_message():
            return "is not one message"
        return ""

    def _is_one_message(self) -> bool:
        lines = [line for line in self.err.splitlines() if not line.startswith(" ")]
        lines = [line for line in lines if "the old one still works" not in line]
        return len(lines) == 1 and lines[0].startswith("megatron-autorecompute")


class TooLongError(BaseException):
    """Not an Exception, which a command may catch."""


def answer(run, limit_s: int = LIMIT_S) -> Answer:
    """What `run()`, an exit code, prints and raises."""
    out, err, raised, code = io.StringIO(), io.StringIO(), "", 0
    started = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited(limit_s):
            code = run()
    except SystemExit as end:
        code = end.code or 0
    except (Exception, TooLongError):
        raised = traceback.format_exc()
    return Answer(code, out.getvalue(), err.getvalue(), time.process_time() - started, raised)


@contextlib.contextmanager
def _limited(limit_s):
    def late(*_):
        raise TooLongError

    # Of the processor, for a busy machine makes no input slow; by the clock only what hangs.
    clocks = (
        (signal.ITIMER_PROF, signal.SIGPROF, limit_s),
        (signal.ITIMER_REAL, signal.SIGALRM, 120),
    )
    before = [signal.signal(number, late) for _, number, _ in clocks]
    for clock, _, seconds in clocks:
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


# --- damage ---------------------------------------------------------------------------------------


def damaged(data, rng):
    """A copy of plain data with up to three places changed."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(data))
        if not places:
            break
        _damage(*rng.choice(places), rng)
    return data


def _places(data):
    waiting = [data]
    while waiting:
        owner = waiting.pop()
        for key in list(owner) if isinstance(owner, dict) else range(len(owner)):
            yield owner, key
            if isinstance(owner[key], (dict, list)):
                waiting.append(owner[key])


def _damage(owner, key, rng):
    how = rng.random()
    if how < 0.3:
        owner[key] = copy.deepcopy(rng.choice(VALUES))
    elif how < 0.55:  # another value of the same type passes the schema
        alike = [value for value in VALUES if type(value) is type(owner[key])]
        owner[key] = copy.deepcopy(rng.choice(alike))
    elif how < 0.65:
        del owner[key]
    elif how < 0.75 and isinstance(owner[key], (int, float)):
        with contextlib.suppress(OverflowError):
            owner[key] *= rng.choice([-1, 0.5, 2, 3, 10**6, 1.0])
    elif how < 0.8:
        for _ in range(rng.choice([1, 100, 5000])):
            owner[key] = [owner[key]]
    elif how < 0.9 and isinstance(owner, list):
        owner.insert(key, owner[key])
    elif isinstance(owner, dict):
        owner[str(rng.choice(VALUES))[:40]] = owner.pop(key)
    else:
        owner.pop(key)


def changed(data, rng):
    """A copy of plain data in which up to three numbers or switches have another value."""
    data = copy.deepcopy(data)
    places = [(o, k) for o, k in _places(data) if isinstance(o[k], (int, float, str))]
    for owner, key in rng.sample(places, rng.choice([1, 1, 2, 3])):
        value = owner[key]
        if isinstance(value, bool):
            owner[key] = not value
        elif isinstance(value, int):
            owner[key] = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 64, 100, 1024, 4096, value * 2])
        elif isinstance(value, float):
            owner[key] = rng.choice([0.0, 0.1, 1.0, 3.5])
        else:
            owner[key] = rng.choice(
                ["silu", "gelu", "local", "bf16", "fp8", "none", "learned_absolute"]
            )
    return data


def damaged_text(text, rng):
    """The text with bytes cut, doubled, or replaced."""
    at = rng.randrange(len(text))
    how = rng.random()
    if how < 0.4:
        return text[:at]
    if how < 0.7:
        return text[:at] + str(rng.choice(VALUES)) + text[at + rng.randrange(8) :]
    return text[:at] + text[at - 20 : at + 20] + text[at:]


def as_text(data, rng, write=json.dumps):
    """The data as JSON or YAML, in one of five cases damaged as text."""
    try:
        text = write(data)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        text = "[" * 100_000
    return damaged_text(text, rng) if rng.random() < 0.2 else text


# --- inputs ---------------------------------------------------------------------------------------


class Inputs:
    """Makes the n-th damaged input in a folder, by seed; each is a function to run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profiles = [json.loads(path.read_text()) for path in PROFILES]
        self.profiles += [_smaller(profile) for profile in self.profiles]
        self.plans = []
        for number, profile in enumerate(self.profiles[len(PROFILES) :]):
            path, plan = folder / "profile.json", folder / f"plan{number}.json"
            path.write_text(json.dumps(profile))
            pp = ["--pp", "2", *(["--vp", "2"] if number == 0 else [])]
            words = ["plan", "--profile", str(path), *pp, "--num-microbatches", "4"]
            done = answer(
                lambda words=words, plan=plan: main([*words, "--budget-gib", "60", "-o", str(plan)])
            )
            assert not done.code, done.err
            self.plans.append(json.loads(plan.read_text()))
        self.jobs = [yaml.safe_load(path.read_text()) for path in JOBS]
        self.kinds = {
            "profile": self.profile,
            "plan": self.plan,
            "flags": self.flags,
            "job": self.job,
        }

    def of(self, seed: int, kind: str = ""):
        """(kind, words, function) of a seed."""
        rng = random.Random(seed)
        kind = kind or rng.choice(list(self.kinds))
        words, run = getattr(self, kind)(rng)
        return kind, words, run

    def profile(self, rng):
        path = self.folder / "p.json"
        path.write_text(as_text(damaged(rng.choice(self.profiles[len(PROFILES) :]), rng), rng))
        if rng.random() < 0.2:
            words = ["show", str(path)]
            return words, lambda: main(words)
        words = [rng.choice(["plan", "plan", "pareto"]), "--profile", str(path)]
        words += ["--pp", "2", "--num-microbatches", "4"] if rng.random() < 0.8 else []
        words += ["--budget-gib", "60"] if words[0] == "plan" else ["--points", "3"]
        return words, lambda: main(words)

    def plan(self, rng):
        path = self.folder / "p.json"
        data = damaged(rng.choice(self.plans), rng)
        if rng.random() < 0.5:
            data.pop(DIGEST, None)
            with contextlib.suppress(ValueError, RecursionError):
                data[DIGEST] = json_records.digest(data)
        path.write_text(as_text(data, rng))
        words = [rng.choice(["show", "show", "explain", "report", "trace"]), str(path)]
        if words[0] in ("show", "explain") and rng.random() < 0.2:
            words.append("--json")
        if words[0] == "show" and rng.random() < 0.2:
            words += ["--svg", "-"]
        return words, lambda: main(words)

    def flags(self, rng):
        path = self.folder / "p.json"
        path.write_text(json.dumps(rng.choice(self.profiles[len(PROFILES) :])))
        words = [rng.choice(["plan", "plan", "pareto"]), "--profile", str(path)]
        words += ["--pp", rng.choice(["1", "2", "4"]), "--num-microbatches", rng.choice(["4", "8"])]
        words += ["--budget-gib", "60"] if words[0] == "plan" else ["--points", "3"]
        verb = words[0]
        for _ in range(rng.choice([1, 1, 1, 2])):
            how = rng.random()
            if how < 0.6:
                texts = rng.choice([TEXTS, LIKELY, LIKELY])
                flag, text = rng.choice([*PROBLEM, *OWN[verb]]), rng.choice(texts)
                at = words.index(flag) if flag in words else len(words)  # twice it is refused
                words[at : at + 2] = flag, text
            elif how < 0.8:
                words.append(rng.choice(SWITCHES))
            elif how < 0.9:
                words[rng.randrange(len(words))] = rng.choice(TEXTS)
            else:
                del words[rng.randrange(len(words))]
        return words, lambda: main(words)

    def _written_job(self, rng, change=damaged):
        path = self.folder / "job.yaml"
        text = as_text(change(rng.choice(self.jobs), rng), rng, yaml.safe_dump)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return str(path)

    def job(self, rng):
        """Read and checked only: the model is not built."""
        path = self._written_job(rng)

        def read():
            try:
                job = load_job(path)
                job.layout(), job.schedule(), job.moe_pattern()
            except AutorecomputeError as error:
                print(f"megatron-autorecompute: {error}", file=sys.stderr)
                return error.exit_code
            return 0

        return [path], read

    def estimate(self, rng):
        """The whole command."""
        change = rng.choice([changed, changed, changed, damaged])
        words = ["estimate", "--gpu", "h100-80gb", self._written_job(rng, change), "-o", "-"]
        return words, lambda: main(words)


def _smaller(profile):
    """The profile with 8 layers or fewer of its first kinds."""
    profile = copy.deepcopy(profile)
    first = 0
    for kind in profile["kinds"]:
        kind["layers"] = list(range(first, first + 8 // len(profile["kinds"])))
        first += len(kind["layers"])
    profile["model"].update(num_layers=first, mtp_num_layers=0)
    profile["stages"] = []
    return profile


def run(numbers, kind=""):
    """The answers of these seeds, one at a time: (seed, kind, words, Answer)."""
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        inputs = Inputs(Path(folder))
        for seed in numbers:
            name, words, function = inputs.of(seed, kind)
            limit_s = ESTIMATE_LIMIT_S if name == "estimate" else LIMIT_S
            yield seed, name, words, answer(function, limit_s)


@contextlib.contextmanager
def _inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", default="", help="profile, plan, flags, job, or estimate")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    codes, wrong, slowest = Counter(), 0, (0.0, 0)
    for seed, kind, words, given in run(range(args.first, args.first + args.number), args.only):
        codes[kind, given.code] += 1
        slowest = max(slowest, (given.seconds, seed))
        if given.wrong:
            wrong += 1
            print(
                f"seed {seed}, {kind}: {words!r:.300}\n{given.wrong}\n{given.err[-600:]}\n---",
                flush=True,
            )
    for (kind, code), count in sorted(codes.items()):
        print(f"{kind}: {count} ended with {code}")
    print(f"slowest: {slowest[0]:.1f} s, seed {slowest[1]}; {wrong} of {args.number} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_main())
