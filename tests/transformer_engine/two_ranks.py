"""Two tensor parallel ranks of Transformer Engine's layers, in forks of a process (tests/forks.py).

Each prints as JSON which policies changed a bit, and what.
"""

import json
import logging
import os
import sys
import warnings

from testing import transformer_engine_torch

transformer_engine_torch.load()

import torch  # noqa: E402

from benchmarks.gpu.models import trained  # noqa: E402
from megatron_autorecompute.meta import without_cuda  # noqa: E402
from tests.forks import serve  # noqa: E402
from tests.transformer_engine.test_equality import on_cpu  # noqa: E402

POLICIES = (
    *("full", "full+keep[core_attn]", "selective[mlp]", "selective[mlp_act]", "selective[qkv]"),
    *("selective[ln_out]", "selective[ln_out+mlp_act]"),
    "full/2*2,selective[core_attn+mlp]*1,selective[ln_out+qkv]*1",
)


def prepare():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main(_):
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    fields = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with without_cuda.activate(), transformer_engine_torch.on_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        case = on_cpu("TE dense with RMSNorm", **fields)
        reference = trained(case, "megatron:none")
        found = {text: trained(case, text).differences(reference) for text in POLICIES}
    sys.stdout.flush()
    os.write(1, f"\nfound {json.dumps(found)}\n".encode())  # in one write, beside the other rank's


if __name__ == "__main__":
    serve(prepare, main)
