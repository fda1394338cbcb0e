"""Ranks as gloo processes.

    def my_ranks_job(tp, pp):                     # at module level; runs in every rank
        ...

    results = run_ranks(my_ranks_job, 4, 2, 2)    # list by rank

A test that needs one rank only, in its own process, calls `run_ranks(function, 1, ...)[0]`.
"""

import gc
import multiprocessing
import os
import pickle
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from megatron_autorecompute.meta import without_cuda


class RankError(Exception):
    """A rank of run_ranks raised, died or did not finish; carries the traceback of that rank."""


IMPORTED = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron_autorecompute.runtime.controller",
    "megatron_autorecompute.report.terminal",
    "rich.table",
    "megatron_autorecompute.meta.model",
    "highspy",
    "scipy.optimize",
    "pytest",
    "hypothesis",
)
"""And all that they import, torch among it; the last two because modules of tests import them, of
which every rank imports one."""


def fresh_processes() -> Any:
    """The multiprocessing context for children: forked from a process that has done nothing but
    import what is `IMPORTED`, which would take each of them seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, __name__])
    return context


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240,
    memory_bytes: int = 12 << 30,
    activate: bool = True,
) -> list[Any]:
    """`function(*args)` in world_size new processes joined by gloo; the results by rank.

    The function is a module-level one; rank and size come from torch.distributed. Each process runs
    one thread, has an address space of at most memory_bytes, and (activate) Megatron usable without
    CUDA. The first failure kills all ranks and is raised here as RankError.
    """
    context = fresh_processes()
    with tempfile.TemporaryDirectory() as folder:
        readers: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            options = (os.path.join(folder, "store"), timeout_s, memory_bytes, activate)
            process = context.Process(
                target=_rank_main, args=(writer, rank, world_size, options, function, args)
            )
            process.start()
            writer.close()  # the child's copy alone is left, so its death ends our read
            readers[reader] = rank
            processes.append(process)
        try:
            return _collect(readers, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: dict[Connection, int], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        pending = [reader for reader, rank in readers.items() if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            missing = sorted(readers[reader] for reader in pending)
            raise RankError(f"ranks {missing} did not finish in time (a deadlock, or too slow)")
        for reader in ready:
            rank = readers[reader]
            try:
                succeeded, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word (killed, or crashed)") from None
            if not succeeded:
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _rank_main(
    writer: Connection,
    rank: int,
    world_size: int,
    options: tuple[str, float, int, bool],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    store_path, timeout_s, memory_bytes, activate = options
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    gc.freeze()  # what was imported need not be looked through again and again
    torch.set_num_threads(1)
    try:
        store = torch.distributed.FileStore(store_path, world_size)
        torch.distributed.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        if activate:
            without_cuda.activate()
        message = (True, function(*args))
        torch.distributed.barrier()  # nobody leaves while a peer still talks to it
    except Exception:  # of any type: the test process raises it, with where it was
        message = (False, traceback.format_exc())
    # Plain pickle copies tensors; the pipe's own would share memory with a process about to end.
    writer.send_bytes(pickle.dumps(message))
    writer.close()
