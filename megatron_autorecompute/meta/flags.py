"""A job from the flags of pretrain_gpt.py, read by Megatron's own parser.

This needs `megatron.training`, which the wheels contain from 0.17 on; otherwise describe the job in
YAML.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_autorecompute.errors import MachineError, OptionError
from megatron_autorecompute.megatron_fields import names_of
from megatron_autorecompute.meta.job import TE_VERSION, Job, job_from
from megatron_autorecompute.meta.job_config import FIELDS, precision_of, refuse_unmodelled
from megatron_autorecompute.meta.meta_step import in_processes
from megatron_autorecompute.meta.without_cuda import deterministic
from megatron_autorecompute.patched import patched, patched_environ
from megatron_autorecompute.planner.cost.hybrid_pattern import check_flags

_COPIED = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "position_embedding_type",
    "rotary_percent",
    "untie_embeddings_and_output_weights",
    "accumulate_allreduce_grads_in_fp32",
    "use_layer_wise_param_layout",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_precision_aware_optimizer",
)
_OPTIMIZERS = ("adam", "muon")
_DTYPES_OF_STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_NAMES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}


def job_from_flags(flags: Sequence[str], num_gpus: int) -> Job:
    """The job that these flags start on `num_gpus` GPUs.

    Raises MachineError without megatron.training, OptionError for flags that Megatron refuses.
    """
    run = functools.partial(_job, list(flags), num_gpus)
    # Megatron's parser runs in a process that sees no CUDA.
    return in_processes(run, [0])[0] if torch.cuda.is_available() else run(0)


def _job(flags: list[str], num_gpus: int, _: int) -> Job:
    args, config = _parsed(flags, num_gpus)
    if args.vocab_size is None:
        raise OptionError("The flags do not say the vocabulary: add --vocab-size N.")
    if getattr(config, "quant_recipe", None) is not None:
        raise OptionError(
            "A file says which layers are quantised, and how (--te-precision-config-file or "
            "Kitchen's flags), which is not read: leave it out, and every linear layer counts as "
            "--fp8-format or --fp4-format say."
        )
    data = {
        "described_by": "flags",
        "name": f"pretrain_gpt on {num_gpus} GPUs",
        "config": plain_config(vars(config)),
        "num_gpus": num_gpus,
        "transformer_impl": args.transformer_impl,
        "attention_mask_in_dataloader": bool(args.create_attention_mask_in_dataloader),
        "disable_parameter_transpose_cache": bool(config.disable_parameter_transpose_cache),
        **settings_of("--optimizer", args, args, precision=args),
    }
    if getattr(args, "hybrid_layer_pattern", None) is not None:
        data["name"] = f"pretrain_hybrid on {num_gpus} GPUs"
        data["config"]["hybrid_layer_pattern"] = args.hybrid_layer_pattern
        data["config"].pop("moe_layer_freq", None)  # the flag's default; the pattern says it
    return job_from(data, "What Megatron read from the flags")


def settings_of(named: str, optimizer: Any, *others: Any, precision: Any) -> dict[str, Any]:
    """A job's fields by Megatron's names for them: of its optimizer, which a message calls `named`,
    of `others`, of which the first that has a field counts, and of fp8 and fp4 in `precision`.

    Raises OptionError for an optimizer that is not modelled.
    """
    holders = *others, optimizer
    found = {
        name: next(getattr(holder, name) for holder in holders if hasattr(holder, name))
        for name in _COPIED
        if any(hasattr(holder, name) for holder in holders)
    }
    kind = str(getattr(optimizer, "optimizer", "adam"))
    found["optimizer"] = kind.removeprefix("dist_")
    if found["optimizer"] not in _OPTIMIZERS:
        raise OptionError(
            f"{named} {kind}: only {' and '.join(_OPTIMIZERS)} are known, because the bytes of "
            "others' states are not counted. Take one of them."
        )
    layer_wise = getattr(optimizer, "use_layer_wise_distributed_optimizer", False)
    found["use_distributed_optimizer"] |= kind.startswith("dist_") or layer_wise
    for name in _DTYPES_OF_STATES if found.get("use_precision_aware_optimizer") else ():
        found[name] = _DTYPE_NAMES[str(getattr(optimizer, name))]
    narrow = {} if precision is None else vars(precision)
    if said := precision_of(narrow):
        found["precision"] = said
    if narrow.get("fp8"):
        found["fp8_param_gather"] = bool(precision.fp8_param_gather)
    return found


def _parsed(flags: list[str], num_gpus: int) -> tuple[Any, Any]:
    """Megatron's namespace and its TransformerConfig."""
    from megatron_autorecompute.meta import kernels, without_cuda

    world = {"WORLD_SIZE": str(num_gpus), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    world["NVTE_CPU_OFFLOAD_V1"] = "1"  # Megatron asks for it where activations are offloaded
    try:
        with (
            without_cuda.activate(training=True),
            deterministic(False),  # the parser turns torch's own on, and leaves it so
            kernels.stand_ins(kernels.ANY),  # the config asks for some of them
            engine(),
            contextlib.redirect_stdout(io.StringIO()),  # Megatron prints every argument
            patched_environ(world),
            patched(sys, "argv", ["pretrain_gpt.py", *flags]),
        ):
            from megatron.training import arguments

            args = _namespace(arguments)
            refuse_unmodelled(vars(args), lambda name: f"--{name.replace('_', '-')}")
            check_flags(args)
            arguments.validate_args(args)
            return args, arguments.core_transformer_config_from_args(args)
    except ModuleNotFoundError as error:
        raise MachineError(
            f"Flags of pretrain_gpt.py are read by Megatron's own parser, and {error.name} is not "
            "installed (the megatron-core wheels carry megatron.training from 0.17 on). Describe "
            "the job in YAML instead; megatron-autorecompute example has some."
        ) from error
    except (AssertionError, ValueError, OSError) as error:
        raise OptionError(f"Megatron refuses these flags: {error}") from error


@contextlib.contextmanager
def engine(version: str = TE_VERSION) -> Iterator[None]:
    """Makes Megatron's checks find the job's version of Transformer Engine, not the one installed
    here, as long as the block runs."""
    from megatron.core import utils

    with patched(utils, "_te_version", utils.PkgVersion(version)):
        yield


def _namespace(arguments: Any) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return arguments.parse_args()
    except SystemExit as error:  # argparse has printed the reason, below the usage of all flags
        reason = (
            said.getvalue().strip().rpartition("\n")[2].removeprefix("pretrain_gpt.py: error: ")
        )
        raise OptionError(f"Megatron refuses these flags: {reason or error}") from error


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TransformerConfig that JSON can represent and that are not None."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "activation_func":
            value = getattr(value, "__name__", value)
        if name == "pipeline_model_parallel_layout":
            value = getattr(value, "input_data", value)
        if name == "attention_backend":
            value = getattr(value, "name", value)
        if name in FIELDS:
            value = names_of(value)
        try:
            json.dumps(value)
        except TypeError:
            continue
        if value is not None:
            found[name] = value
    return found
