"""Where a command reads its job: a YAML file, an example of this package, a recipe, or flags."""

from __future__ import annotations

import dataclasses
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_autorecompute.cli.command import Command, at_least
from megatron_autorecompute.cli.output import without_effect
from megatron_autorecompute.errors import AutorecomputeError, OptionError
from megatron_autorecompute.meta.devices import Device, device, devices
from megatron_autorecompute.meta.job import Job, job_from, read_description
from megatron_autorecompute.options import nearest
from megatron_autorecompute.profile import Profile

EXAMPLES = Path(__file__).parents[1] / "examples"
"""Job descriptions, NAME.yaml, and profiles of some of them, NAME.GPU.json, as `make recorded` made
them."""
SOURCES = "JOB.yaml, --example NAME, --recipe NAME, or -- and the flags of pretrain_gpt.py"
_CONFIG = "config."
_SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "gbs": "global_batch_size",
    "mbs": "micro_batch_size",
}
"""What people call the fields that they set most often."""


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
        type=example,
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
        help="size of the vocabulary, for a recipe that leaves it to its tokenizer",
    )
    parser.add_argument(
        "--num-gpus", type=at_least(1), metavar="N", help="GPUs of the job, for flags or a recipe"
    )


def add_gpu(parser: ArgumentParser, default: str = "") -> None:
    """Add `--gpu`. Its help lists every known name; so does the error for a missing name.

    Args:
        parser: gets the flag.
        default: what the help says of a command line without it.
    """
    text = f"what the job runs on: {', '.join(devices())}{default}"
    parser.add_argument("--gpu", nargs="?", const="", metavar="NAME", help=text)


def examples() -> list[str]:
    """Names of all examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def example(name: str) -> str:
    """The reader of an example's name."""
    known = examples()
    if name in known:
        return name
    meant = f"{name!r} is no example; the nearest is {nearest(name, known)}. " if name else ""
    raise ArgumentTypeError(f"{meant}Name one of {', '.join(known)}")


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
    return Profile.load(path) if args.example and not args.set and path.is_file() else None


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
    if args.num_gpus is not None:
        raise without_effect(
            "--num-gpus",
            args.example or str(path),
            "the file says how many GPUs, and --set num_gpus=N changes it",
        )
    source = str(path) if args.example is None else f"The example {args.example}"
    return changed(read_description(path), args.set, source)


def _read_by_megatron(args: Namespace, gpu: Device | None) -> Job:
    if args.recipe is not None:
        from megatron_autorecompute.meta.recipe import job_from_recipe

        return job_from_recipe(args.recipe, args.num_gpus, args.vocab_size, gpu)
    if args.num_gpus is None:
        raise OptionError("Flags of pretrain_gpt.py do not say how many GPUs: add --num-gpus N.")
    from megatron_autorecompute.meta.flags import job_from_flags

    return job_from_flags(args.megatron_flags, args.num_gpus)


def changed(described: Any, settings: Sequence[tuple[str, Any]], source: str) -> Job:
    """The job with other values for some of its fields.

    Args:
        described: a Job, or a description as `read_description` returns it.
        settings: fields' names and values; of two values for one name the last counts.
        source: what error messages call the description.

    Raises OptionError for a name that neither a job nor its config has, or a job that cannot be.
    """
    data = dataclasses.asdict(described) if isinstance(described, Job) else described
    if not settings or not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        return job_from(data, source)
    data = {**data, "config": dict(data["config"])}
    for name, value in settings:
        part, field = (
            (data, name) if name in _fields() else (data["config"], _of_config(name, data))
        )
        part[field] = value
    return job_from(data, f"{source}, with {', '.join(f'{n}={v}' for n, v in settings)}")


def _fields() -> set[str]:
    return {field.name for field in dataclasses.fields(Job)} - {"config"}


def _of_config(name: str, data: Mapping[str, Any]) -> str:
    field, config = name.removeprefix(_CONFIG), data["config"]
    if field in config:
        return field
    from megatron_autorecompute.meta.model import config_names  # loads torch and Megatron

    known = config_names(bool(config.get("multi_latent_attention")))
    if field not in known:
        near = _SHORT.get(field) or nearest(field, [*_fields(), *known])
        raise OptionError(
            f"--set {name}: neither a job nor Megatron's config has such a field. The nearest name "
            f"is {near}."
        )
    return field


def named_gpu(args: Namespace) -> Device:
    """The GPU of a job; OptionError with all names if `--gpu` is missing or unknown."""
    if not args.gpu:
        if args.job is not None:
            read_description(args.job)  # a file that is no job needs another mend than --gpu
        raise OptionError(f"Add --gpu NAME, which the job runs on: {', '.join(devices())}.")
    return device(args.gpu)


def command_with(args: Namespace, job: Job, settings: Mapping[str, Any]) -> str | None:
    """The command line as it was typed, with other settings of its job; None if no job can have
    them."""
    try:
        changed(job, list(settings.items()), job.name)
    except AutorecomputeError:
        return None
    return as_typed(args, [w for n, v in settings.items() for w in ("--set", f"{n}={v}")])


def as_typed(args: Namespace, more: Sequence[str]) -> str:
    """The command line as it was typed, with more options; each in place of a typed one of its
    name, but for `--set`."""
    words = args.typed
    cut = words.index("--") if "--" in words else len(words)
    flags = {word for word in more if word.startswith("--")} - {"--set"}
    whole = ["megatron-autorecompute", *_without(flags, words[:cut]), *more, *words[cut:]]
    return shlex.join(whole)


def _without(flags: Container[str], words: Iterable[str]) -> Iterator[str]:
    """Words without some flags and the value of each."""
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name not in flags:
            yield word
        elif not equals:
            next(left, None)


class ExampleCommand(Command):
    """Prints the YAML of an example; without a name, the names."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the example's name."""
        parser.add_argument("example", nargs="?", type=example, metavar="NAME")

    def run(self, args: Namespace) -> None:
        """Print the example's job description."""
        if args.example is not None:
            print((EXAMPLES / f"{args.example}.yaml").read_text(encoding="utf-8"), end="")
            return
        for name in examples():
            first = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
            print(f"{name:20} {first.removeprefix('# ')}")
