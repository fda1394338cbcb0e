"""Train any Megatron Bridge recipe with `model.recompute_policy`, `auto` included.

    torchrun --nproc-per-node 8 -m megatron_autorecompute.bridge_pretrain \\
        --recipe llama3_8b_pretrain_config train.train_iters=100 model.recompute_policy=auto

Bridge's own launchers pass no callbacks to its training loop, which `auto` needs; this one does,
and otherwise takes what scripts/training/run_recipe.py of Bridge takes. What follows the flags are
Hydra overrides. Exit codes: docs/exit-codes.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_autorecompute.errors import AutorecomputeError, OptionError
from megatron_autorecompute.integrations import megatron_bridge, megatron_lm
from megatron_autorecompute.megatron_fields import POLICY_FIELD
from megatron_autorecompute.options import add_flags, from_flags, nearest
from megatron_autorecompute.packages import needed
from megatron_autorecompute.runtime.auto_options import AutoOptions

POLICY = f"model.{POLICY_FIELD}="
STEPS = ("gpt_step", "vlm_step", "llava_step")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the recipe that `arguments` (default: `sys.argv[1:]`) name.

    Raises: SystemExit with the reason printed and the exit code of an `AutorecomputeError`."""
    try:
        args, overrides = _parse(arguments)
        options = from_flags(AutoOptions, args)
        with needed("bridge_pretrain"):
            megatron_bridge.install()
            cfg = _overridden(_recipe(args), args.config_file, overrides)
            _check_mode(args, cfg)
            module = importlib.import_module(f"megatron.bridge.training.{args.step_func}")
        megatron_bridge.pretrain(cfg, module.forward_step, options=options)
    except AutorecomputeError as error:
        megatron_lm.end(error)


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe",
        required=True,
        help="name of a recipe in megatron.bridge.recipes, or FILE.py:FUNCTION",
    )
    parser.add_argument("--mode", choices=("pretrain", "finetune"), help="default: by the name")
    parser.add_argument("--step_func", choices=STEPS, default="gpt_step")
    parser.add_argument("--peft_scheme", help="lora or dora, for recipes that take it")
    parser.add_argument("--config-file", help="YAML to merge before the overrides")
    add_flags(parser, AutoOptions)
    args, overrides = parser.parse_known_args(arguments)
    unknown = [text for text in overrides if text.startswith("-") or "=" not in text]
    if unknown:
        parser.error(f"neither a flag nor an override such as train.train_iters=10: {unknown}")
    return args, overrides


def _recipe(args: argparse.Namespace) -> Any:
    make = _recipe_function(args.recipe)
    takes = inspect.signature(make).parameters
    schemes = [name for name in ("peft_scheme", "peft") if name in takes]
    if args.peft_scheme is None:
        return make()
    if not schemes:
        raise OptionError(
            f"--peft_scheme {args.peft_scheme} was given, but {args.recipe} takes none: choose a "
            "recipe whose name has peft in it."
        )
    return make(**{schemes[0]: args.peft_scheme})


def _recipe_function(name: str) -> Callable[..., Any]:
    path, _, function = name.rpartition(":")
    if path:
        return _function_in_file(Path(path), function)
    import megatron.bridge.recipes as recipes

    if not hasattr(recipes, name):
        raise OptionError(
            f"There is no recipe {name} in megatron.bridge.recipes; the nearest is "
            f"{nearest(name, dir(recipes))}. A recipe of your own is FILE.py:FUNCTION."
        )
    recipe: Callable[..., Any] = getattr(recipes, name)
    return recipe


def _function_in_file(path: Path, function: str) -> Callable[..., Any]:
    if not path.is_file():
        raise OptionError(f"There is no recipe file {path}: give FILE.py:FUNCTION.")
    names = runpy.run_path(str(path), run_name=path.stem)
    if function not in names:
        like = [name for name in names if name.endswith("config")]
        raise OptionError(f"{path} has no function {function}; it has {', '.join(like)}.")
    found: Callable[..., Any] = names[function]
    return found


def _overridden(cfg: Any, config_file: str | None, overrides: Sequence[str]) -> Any:
    """The recipe with the overrides; a policy on the command line beats the recipe's recompute."""
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    if any(text.startswith(POLICY) for text in overrides):
        megatron_bridge.set_policy(cfg.model, None)
    return process_config_with_overrides(
        cfg,
        config_filepath=config_file,
        cli_overrides=[_quoted(text) for text in overrides] or None,
    )


def _quoted(override: str) -> str:
    """Hydra reads commas and brackets as its own: quote the policy, so that the shell need not."""
    value = override.removeprefix(POLICY)
    if value == override or value[:1] in ("'", '"', "[", "{") or value == "null":
        return override
    return f"{POLICY}'{value}'"


def _check_mode(args: argparse.Namespace, cfg: Any) -> None:
    """Bridge's `finetune` is its `pretrain` after this check; 0.3.1's passes no callbacks on."""
    finetune = any(word in args.recipe for word in ("finetune", "sft", "peft"))
    mode = args.mode or ("finetune" if finetune else "pretrain")
    checkpoint = cfg.checkpoint
    if mode == "finetune" and checkpoint.pretrained_checkpoint is None and checkpoint.load is None:
        raise OptionError(
            "Finetuning starts from a checkpoint and none was given: set "
            "checkpoint.pretrained_checkpoint=PATH, or checkpoint.load=PATH to go on with a run."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
