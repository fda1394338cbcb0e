"""Transformer Engine on CPU, in this process before Megatron, which asks for it, is imported."""

import pytest

from testing import transformer_engine_torch

transformer_engine_torch.load()


def pytest_collection_modifyitems(items):
    for item in items:
        # TE warns of how Megatron calls it.
        item.add_marker(pytest.mark.filterwarnings("ignore:Relying on pointer-based"))


@pytest.fixture(scope="module")
def one_rank():
    from benchmarks.gpu.cases import started

    with started(), transformer_engine_torch.on_cpu():
        yield


@pytest.fixture(autouse=True)
def _attention_backend_is_chosen_anew(monkeypatch):
    # Megatron writes its config's backend into these, and refuses a model that asks for another.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
