"""Bridge with the field and without CUDA in the test process; nothing to collect without Bridge."""

import importlib.util
import warnings

import pytest
import torch


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


collect_ignore_glob = [] if _is_installed("megatron.bridge") else ["test_*.py"]


def pytest_collection_modifyitems(items):
    # Bridge, transformers, pydantic inside them and modelopt warn of one another on import and use.
    for item in items:
        if item.nodeid.startswith("tests/bridge"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def bridge():
    """megatron.bridge with the field, imported for good: a process cannot import it twice."""
    from testing import bridge_launch as launch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launch.prepare(patch=lambda *args: None)
        import megatron.bridge

    return megatron.bridge


@pytest.fixture
def overridden(bridge, monkeypatch):
    """What the launcher would train: a recipe's config, with overrides after it."""
    from megatron.bridge import recipes

    from megatron_autorecompute import bridge_pretrain
    from megatron_autorecompute.integrations import megatron_bridge

    def override(cfg, *overrides):
        given = []
        monkeypatch.setattr(recipes, "given_pretrain_config", lambda: cfg, raising=False)
        monkeypatch.setattr(megatron_bridge, "pretrain", lambda cfg, *_, **__: given.append(cfg))
        bridge_pretrain.main(["--recipe", "given_pretrain_config", *overrides])
        return given[0]

    return override


@pytest.fixture(scope="module")
def one_rank(bridge):
    """Megatron without CUDA and a world of one."""
    from megatron_autorecompute.meta import without_cuda
    from tests.support import start_parallel

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with without_cuda.activate():
        start_parallel()
        yield
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
