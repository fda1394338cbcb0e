"""For all tests: how hypothesis runs, that children can be interrupted, and a world of one rank."""

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

MEMORY_BYTES = 14 << 30

# An example takes as long as the machine is busy; pytest-timeout catches what hangs.
settings.register_profile(
    "no_deadline", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no_deadline")

# Until all is imported nothing is garbage, and later none of that need be looked through.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# A shell's background job starts with SIGINT ignored, which every child would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A thread of gloo's that is woken would stop the one that wakes it, and spin for the lock that this
# one holds.
with contextlib.suppress(AttributeError, OSError):  # where there is no such thing, or it is refused
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def _forking():
    """What starts processes of its own starts them as run_ranks does: none imports Megatron again.

    Not where a test takes capfd: they inherit neither its streams nor its environment.
    """
    usual = multiprocessing.get_context

    def get_context(method=None):
        if method != "spawn":
            return usual(method)
        from testing.ranks import fresh_processes

        return fresh_processes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_context)
        yield


@pytest.fixture(scope="session")
def forking():
    """For fixtures of modules, which come before `_forked`."""
    return _forking


@pytest.fixture(autouse=True)
def _forked(request):
    with contextlib.nullcontext() if "capfd" in request.fixturenames else _forking():
        yield


@dataclass(frozen=True)
class Examples:
    """Profiles and plans of three examples of the package."""

    folder: Path
    largest_bytes: int
    """Memory of the largest process that has run so far."""


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """The examples' own script takes most of a minute: once for all tests."""
    pytest.importorskip("megatron.core")
    from tests.support import EXAMPLE_JOBS, EXAMPLES

    folder = tmp_path_factory.mktemp("examples")
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    paths["PYTHONPATH"] = f"{EXAMPLES.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [str(EXAMPLES.parents[1] / "scripts" / "plan_examples.sh"), str(folder), *EXAMPLE_JOBS],
        capture_output=True,
        text=True,
        env={**os.environ, **paths},
    )
    assert ran.returncode == 0, ran.stderr
    largest_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Examples(folder, largest_kib << 10)


@pytest.fixture(scope="module")
def one_rank():
    """One rank in the test process itself, for all tests that need no second one: Megatron without
    CUDA and a world of one; a runaway backward fails instead of swapping."""
    import torch

    from megatron_autorecompute.meta import without_cuda
    from tests.support import start_parallel

    # Two threads that wait for each other make the tiny matrix products 100 times slower.
    torch.set_num_threads(1)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    hardest = MEMORY_BYTES if limits[1] == resource.RLIM_INFINITY else min(MEMORY_BYTES, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (hardest, limits[1]))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with without_cuda.activate():
        start_parallel()
        gc.collect()
        gc.freeze()  # what was imported need not be looked through again and again
        yield
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    resource.setrlimit(resource.RLIMIT_AS, limits)
