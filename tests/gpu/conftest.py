"""One mark, `requires_gpu`, and one rank with Megatron's groups on it.

GPU_TESTS_ANYWHERE=1 runs what needs neither CUDA nor Transformer Engine on CPU: a dry run of the
tests themselves.
"""

import os
from importlib import util

import pytest
import torch

ANYWHERE = os.environ.get("GPU_TESTS_ANYWHERE") == "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "requires_gpu: skipped where there is no CUDA device")
    config.addinivalue_line("markers", "requires_te: skipped without Transformer Engine on CUDA")
    config.addinivalue_line("markers", "requires_fla: skipped without fla's kernels, or core 0.19")


def pytest_collection_modifyitems(items):
    from megatron_autorecompute.compat import rules

    on_cuda = torch.cuda.is_available()
    reasons = {
        "requires_gpu": None if on_cuda or ANYWHERE else "no CUDA device",
        "requires_te": None
        if on_cuda and util.find_spec("transformer_engine")
        else "no Transformer Engine on CUDA",
        "requires_fla": None
        if on_cuda and util.find_spec("fla") and "gdn_norm_out" in rules.allowed_modules()
        else "no flash-linear-attention on CUDA, or megatron-core below 0.19",
    }
    for item in items:
        # The versions on a GPU machine are not pinned: what they warn of must not hide the bits.
        item.add_marker(pytest.mark.filterwarnings("default"))
        for mark, reason in reasons.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def one_gpu():
    """Megatron on one device, with kernels that give the same bits every time."""
    from benchmarks.gpu.cases import started

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    with started():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _attention_backend_is_chosen_anew(monkeypatch):
    # Megatron writes its config's backend into these, and refuses a model that asks for another.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
