"""One rank in the test process itself, for all tests that need no second one."""

import resource

import pytest
import torch

MEMORY_BYTES = 14 << 30


@pytest.fixture(scope="module")
def one_rank():
    """Megatron without CUDA and a world of one; a runaway backward fails instead of swapping."""
    from megatron_autorecompute.meta import without_cuda
    from tests.support import start_parallel

    # Two threads that wait for each other make the tiny matrix products 100 times slower.
    torch.set_num_threads(1)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, limits[1]))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with without_cuda.activate():
        start_parallel()
        yield
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    resource.setrlimit(resource.RLIMIT_AS, limits)
