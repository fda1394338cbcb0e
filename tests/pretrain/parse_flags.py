"""In the place of a job: says how each line of flags in a file ends."""

import sys
from pathlib import Path

from megatron_autorecompute.integrations import megatron_lm

# Packages put objects into sys.modules that are no modules: statsmodels has Cython's there.
sys.modules["no_module"] = object()
megatron_lm.prepare_cpu()
megatron_lm.install()

from megatron.training.arguments import parse_args, validate_args  # noqa: E402

for number, flags in enumerate(Path(sys.argv[1]).read_text().splitlines()):
    sys.argv = ["pretrain", *flags.split()]
    try:
        args = validate_args(parse_args())
        if args.recompute_choices == "megatron":
            print("runs", megatron_lm.job_policy.format(), flush=True)
        print("ends", number, "accepted", flush=True)
    except SystemExit as end:
        print("ends", number, end.code, flush=True)
raise SystemExit
