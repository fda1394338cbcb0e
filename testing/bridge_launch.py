"""Run a Python module that uses Bridge without CUDA and Transformer Engine, in this process.

    python -m testing.bridge_launch MODULE <its arguments>

After training it prints a digest of all parameters, and those after the model was built.
"""

import hashlib
import importlib.util
import runpy
import sys
import types
import typing
from pathlib import Path

import torch

from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.meta import without_cuda
from testing import bridge_stand_ins as stand_ins


def prepare(patch=setattr):
    """Import Bridge with the field, and let its training start without CUDA.

    patch: setattr, or pytest's monkeypatch.setattr.
    """
    if not hasattr(typing, "override"):  # Python 3.12's, in Bridge since 0.4
        typing.override = lambda method: method
    megatron_bridge.install()
    stand_ins.install()
    _load_helpers()
    from megatron.bridge.peft import utils as peft_utils
    from megatron.bridge.training import initialize, setup

    peft_utils.HAVE_TE = False  # found, but core gives None for every layer of it
    original = setup.initialize_megatron
    properties = types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=0)
    patch(setup, "initialize_megatron", lambda **kw: original(**kw, allow_no_cuda=True))
    patch(setup, "set_jit_fusion_options", lambda *args: None)
    patch(initialize, "compile_helpers", lambda: None)
    patch(torch.cuda, "device_count", lambda: 1)
    patch(torch.cuda, "set_device", lambda device: None)
    patch(torch.cuda, "get_device_properties", lambda device=None: properties)
    patch(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    barrier = torch.distributed.barrier  # gloo refuses device_ids
    patch(torch.distributed, "barrier", lambda group=None, **_: barrier(group=group))


def _load_helpers():
    """A checkout has megatron.core's compiled helpers not built; those of an installed wheel do."""
    import megatron

    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is None:
        folders = (Path(path, "core", "datasets") for path in megatron.__path__)
        built = next(file for folder in folders for file in folder.glob("helpers_cpp*.so"))
        spec = importlib.util.spec_from_file_location(name, built)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def print_weights():
    """Have training print a digest of this rank's weights at its end, on every rank."""
    from megatron.bridge.training import train

    original = train.train

    def train_and_print(forward_step, model, *args, **kwargs):
        original(forward_step, model, *args, **kwargs)
        digest = hashlib.sha256()
        for chunk in model:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().float().numpy().tobytes())
        rank = torch.distributed.get_rank()
        print(f"weights of rank {rank}: {digest.hexdigest()}", flush=True)

    from megatron.bridge.training import pretrain

    pretrain.train = train_and_print


if __name__ == "__main__":
    torch.set_num_threads(1)
    without_cuda.activate()
    prepare()
    print_weights()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
