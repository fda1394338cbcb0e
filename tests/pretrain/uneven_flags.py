"""Runs first in a rank: rank 1 is started with another policy, or without auto."""

import os

from megatron.training import arguments

original = arguments.parse_args


def parse_args(*given, **named):
    args = original(*given, **named)
    auto = args.recompute_policy == "auto"
    args.recompute_policy = None if auto else "none"
    args.recompute_memory_budget_gib = None
    return args


if os.environ["RANK"] == "1":
    arguments.parse_args = parse_args
