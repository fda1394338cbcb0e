"""Run a Megatron-LM script as it is on disk: only what Megatron needs to run on CPU is put in.

What a job is compared with, and how a checkout with our patch in it is started.
"""

import os
import runpy
import sys

from megatron_autorecompute.integrations import megatron_lm

if __name__ == "__main__":
    script = sys.argv[1]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    megatron_lm.prepare_cpu()
    sys.argv = sys.argv[1:]
    runpy.run_path(script, run_name="__main__")
    megatron_lm.leave_together()
