"""Where a command reads its job: a YAML file, an example of this package, a recipe, or flags."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_autorecompute.cli.arguments import at_least
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Device, device, devices
from megatron_autorecompute.meta.job import Job, job_from, read_description
from megatron_autorecompute.profile import Profile

EXAMPLES = Path(__file__).parents[1] / "examples"
"""Job descriptions, NAME.yaml, and profiles of some of them, NAME.GPU.json, as `make recorded` made
them."""
SOURCES = "JOB.yaml, --example NAME, --recipe NAME, or -- and the flags of pretrain_gpt.py"


def add_job(parser: ArgumentParser) -> None:
    """Add the ways to describe a job."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB.yaml",
        help="a file that describes the job: docs/files.md",
    )
    parser.add_argument(
        "--example",
        nargs="?",
        const="",
        choices=examples(),
        metavar="NAME",
        help=f"a job of this package: {', '.join(examples())}",
    )
    parser.add_argument("--recipe", metavar="NAME", help="a recipe function of Megatron Bridge")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="change a field of the job or of its config, such as num_gpus=64; repeatable",
    )
    parser.add_argument(
        "--vocab-size",
        type=at_least(1),
        metavar="N",
        help="size of the vocabulary, if a recipe leaves it to its tokenizer",
    )
    parser.add_argument(
        "--num-gpus", type=at_least(1), metavar="N", help="GPUs of the job; flags do not say them"
    )


def add_gpu(parser: ArgumentParser, default: str = "") -> None:
    """Add `--gpu`; `default` is what the help says of a command line without it."""
    text = f"what the job runs on: {', '.join(devices())}{default}"
    parser.add_argument("--gpu", nargs="?", const="", metavar="NAME", help=text)


def examples() -> list[str]:
    """Names of all examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def setting(text: str) -> tuple[str, Any]:
    """The reader of NAME=VALUE, with the value as in YAML."""
    import yaml

    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r}: write NAME=VALUE, such as num_gpus=64")
    try:
        return name, yaml.safe_load(value)
    except Exception as error:  # the parser lets every error of its own out
        raise ArgumentTypeError(f"{text!r}: {value!r:.80} is no value in YAML") from error


def carried() -> list[str]:
    """The jobs and GPUs of the carried profiles, such as `llama3-70b on h100-80gb`."""
    return sorted(path.stem.replace(".", " on ") for path in EXAMPLES.glob("*.json"))


def recorded(args: Namespace, gpu: Device) -> Profile | None:
    """The profile that this package carries of an unchanged example on a GPU; None without one."""
    path = EXAMPLES / f"{args.example}.{gpu.name}.json"
    return Profile.load(path) if args.example and not _settings(args) and path.is_file() else None


def given_sources(args: Namespace) -> int:
    """How many descriptions of a job a command line has."""
    given = (args.job, args.example, args.recipe, args.megatron_flags or None)
    return sum(each is not None for each in given)


def read_job(args: Namespace, gpu: Device | None = None) -> Job:
    """The job that exactly one source describes, with what `--set` changes.

    Raises OptionError for none or several sources, or a job that cannot be.
    """
    if (number := given_sources(args)) != 1:
        raise OptionError(f"Asked for {number} job descriptions; give exactly one of {SOURCES}.")
    path = args.job if args.example is None else EXAMPLES / f"{args.example}.yaml"
    if path is None:
        job = _read_by_megatron(args, gpu)
        return changed(job, args.set, job.name) if args.set else job
    source = str(path) if args.example is None else f"The example {args.example}"
    return changed(read_description(path), _settings(args), source)


def _settings(args: Namespace) -> list[tuple[str, Any]]:
    """What the command line changes in the description of a file."""
    given = {"num_gpus": args.num_gpus, "vocab_size": args.vocab_size}
    return [*((name, n) for name, n in given.items() if n is not None), *args.set]


def _read_by_megatron(args: Namespace, gpu: Device | None) -> Job:
    if args.recipe is not None:
        from megatron_autorecompute.meta.recipe import job_from_recipe

        return job_from_recipe(args.recipe, args.num_gpus, args.vocab_size, gpu)
    if args.num_gpus is None:
        raise OptionError("Flags of pretrain_gpt.py do not say how many GPUs: add --num-gpus N.")
    from megatron_autorecompute.meta.flags import job_from_flags

    return job_from_flags(args.megatron_flags, args.num_gpus)


def changed(described: Any, settings: Sequence[tuple[str, Any]], source: str) -> Job:
    """The job, or the description that `read_description` returned, with other values for some of
    its fields, or else of its config's; `source` is what messages call it.

    Raises OptionError for a job that cannot be.
    """
    data = dataclasses.asdict(described) if isinstance(described, Job) else described
    if not settings or not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        return job_from(data, source)
    own = {field.name for field in dataclasses.fields(Job)} - {"config"}
    data = {**data, "config": dict(data["config"])}
    for name, value in settings:
        (data if name in own else data["config"])[name.removeprefix("config.")] = value
    return job_from(data, f"{source}, with {', '.join(f'{n}={v}' for n, v in settings)}")


def named_gpu(args: Namespace) -> Device:
    """The GPU of a job; OptionError with all names if `--gpu` is missing or unknown."""
    if not args.gpu:
        if args.job is not None:
            read_description(args.job)  # a file that is no job needs another mend than --gpu
        raise OptionError(f"Add --gpu NAME, which the job runs on: {', '.join(devices())}.")
    return device(args.gpu)
