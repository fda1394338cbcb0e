"""What megatron-core 0.16 - 0.19 needs to run without CUDA: on CPU with gloo, or on meta tensors.

Megatron-core assumes a CUDA device in a few dozen places. ``activate()`` puts a stand-in at each of
them, and at its end every original object is there again. Importing this module changes nothing. If
CUDA is available, activation is refused: use the real device.

The stand-ins do not change results: a run with recompute equals one without, bit for bit, because
they keep one generator state per Megatron RNG stream. Memory functions of ``torch.cuda`` return 0.

* ``pipeline_dtype`` must be set, ``batch_p2p_comm=False``; two or more chunks per stage on gloo
  also need ``overlap_p2p_comm=True``: by default the losses are right and the gradients wrong.
* megatron-core 0.16 with ``overlap_p2p_comm=True`` on gloo also needs
  ``deallocate_pipeline_outputs=False``: the output is freed while gloo still sends it.
* No fusions, context parallelism, FP8, grouped GEMM and ``megatron.core.distributed.fsdp``.
* ``mlp`` recompute with ``add_bias_linear=True`` never returns from backward (on any device).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import sys
import time
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.meta.ops import (
    Gradients,
    Ran,
    Saved,
    concatenated,
    generator_states,
    host_operations,
    kernel_with_backward,
)
from megatron_autorecompute.patched import patched, unchanged_environ
from megatron_autorecompute.runtime.live_bytes import count_once

Patch = tuple[Any, str, Any]  # (owner, attribute name, replacement)

_active: dict[str, contextlib.ExitStack] = {}
"""What restores everything, by who has activated the stand-ins; at most one."""


def activate(*, meta: bool = False, training: bool = False) -> contextlib.ExitStack:
    """Let megatron-core run without CUDA until the end of a `with` block of what is returned, or
    its ``close()``; `meta`: on meta tensors, where no RNG state is kept and MoE tokens are routed
    evenly; `training`: with what ``megatron.training`` needs of the machine.

    Raises MachineError if CUDA is available, or if already active (naming who activated it)."""
    caller = sys._getframe(1)  # inspect.stack looks through every module, for 0.2 s
    holder = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    if torch.cuda.is_available():
        raise MachineError(
            f"{holder} asked to run Megatron without CUDA, but CUDA is available here. Run on the "
            "device, or hide it with CUDA_VISIBLE_DEVICES= (empty) before Python starts."
        )
    for other in _active:
        raise MachineError(
            f"{holder} asked to run Megatron without CUDA, but {other} already did and "
            "still holds it. Call close() on what activate() returned there first."
        )
    device = torch.device("meta" if meta else "cpu")
    with contextlib.ExitStack() as undo:
        # Megatron compiles what `jit_fuser` marks, for seconds each, with g++. The stance works at
        # call time, so unlike TORCHDYNAMO_DISABLE it covers functions decorated before.
        undo.enter_context(cast(Any, torch.compiler.set_stance("force_eager")))
        for patches in _PATCHES + (_TRAINING if training else ()):
            for patch in patches(device):
                undo.enter_context(patched(*patch))
        undo.callback(_active.clear)
        _active[holder] = undo.pop_all()
    return _active[holder]


@contextlib.contextmanager
def on_the_device() -> Iterator[None]:
    """In this block, the stand-ins that one process also needs where there is CUDA: names that
    recompute uses and Transformer Engine defines, and a state of its own for auxiliary losses."""
    device = torch.device("cuda")
    with contextlib.ExitStack() as undo:
        for patches in (_te_names, _kept_by_the_process):
            for patch in patches(device):
                undo.enter_context(patched(*patch))
        yield


# ------------------------------------------------------------------------------------ torch itself


def _typing_override(device: torch.device) -> Iterator[Patch]:
    """Symptom: ImportError: cannot import name 'override' from 'typing' on Python < 3.12.
    Upstream: megatron/training/models/gpt.py of 0.19 (its wheels ask for Python >= 3.12).
    Remove when: Python 3.11 is dropped."""
    if not hasattr(typing, "override"):
        import typing_extensions

        yield typing, "override", typing_extensions.override


def _of_cuda(device: torch.device) -> Iterator[Patch]:
    """Symptom: "Found no NVIDIA driver" and "Torch not compiled with CUDA enabled" from torch.cuda.
    Upstream: parallel layers, CudaRNGStatesTracker, MoE dispatchers, DistributedDataParallel,
    timers, training_log, report_memory. Remove when: Megatron asks torch.accelerator."""
    yield torch.cuda, "manual_seed", torch.manual_seed
    for module in (torch.cuda, torch.cuda.random):
        yield module, "get_rng_state", lambda device="cuda": torch.get_rng_state()
        yield module, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state)
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "Event", _Event
    answers = {
        "current_device": device,
        **dict.fromkeys(("current_stream", "default_stream"), _Stream()),
        "stream": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
        "memory_stats": defaultdict(int),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), 0),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_stream", "synchronize", "empty_cache")),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated")),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, _answers(answer)
    yield torch.Tensor, "record_stream", _answers(None)
    yield torch.cuda.nvtx, "range_push", _answers(0)
    yield torch.cuda.nvtx, "range_pop", _answers(0)


def _answers(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


class _Event:
    """torch.cuda.Event on the host's clock: earlier work is already done when it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end._time_s - self._time_s) * 1e3

    query = wait = synchronize = _answers(True)


class _Stream:
    """torch.cuda.Stream on a machine where everything runs in program order."""

    cuda_stream = 0
    priority_range = _answers((0, -1))
    __init__ = wait_stream = wait_event = synchronize = __exit__ = _answers(None)
    query = _answers(True)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self


def _device_literals(device: torch.device) -> Iterator[Patch]:
    """Symptom: "Torch not compiled with CUDA enabled" for device="cuda" and .cuda().
    Upstream: schedules.py, finalize_model_grads.py, p2p_communication.py, optimizer.py and others.
    Remove when: those use the device of their inputs."""
    # On first use torch caches, by identity, the factories that obey `with torch.device(...)`: fill
    # this cache with the originals, which the replacements call.
    torch.utils._device._device_constructors()
    for owner, name in (*((torch, name) for name in _FACTORIES), (torch.Tensor, "to")):
        yield owner, name, _without_cuda_device(getattr(owner, name), device)
    yield torch.Tensor, "cuda", lambda self, *args, **kwargs: self
    yield torch.nn.Module, "cuda", lambda self, device=None: self


_FACTORIES = (
    *("arange", "as_tensor", "eye", "full", "full_like", "linspace", "tensor"),
    *("empty", "empty_like", "empty_strided", "ones", "ones_like", "zeros", "zeros_like"),
    *("rand", "randint", "randn"),
)


def _without_cuda_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function on another device where it is given "cuda:1", torch.device("cuda") and the
    like; and without pinned memory, which needs a CUDA context."""

    def given(value: Any) -> Any:
        named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return device if named else value

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: given(value) for name, value in kwargs.items() if name != "pin_memory"}
        return function(*map(given, args), **kwargs)

    return wrapper


def _tensor_type(device: torch.device) -> Iterator[Patch]:
    """Symptom: "Wrapped parameter must be one of torch.cuda.FloatTensor, ..." and the like.
    Upstream: Float16OptimizerWithFloat16Params, DistributedOptimizer compare tensor.type() with
    literals that start with "torch.cuda.".
    Remove when: they compare dtypes."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    yield torch.Tensor, "type", type_


def _dropout(device: torch.device) -> Iterator[Patch]:
    """Symptom: dropout masks take the input's element size, where CUDA keeps one byte.
    Upstream: at::dropout uses the fused native_dropout (bool mask) on CUDA only. Without this a
    16-bit layer of h=1024, a=16, s=1024 holds 132 sbh instead of the paper's 114.
    Remove when: at::dropout is fused on CPU."""
    functional = torch.nn.functional
    original = functional.dropout

    @functools.wraps(original)
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if training and 0 < p < 1 and not inplace:  # the condition of is_fused_kernel_acceptable
            return torch.native_dropout(input, p, True)[0]
        return original(input, p, training, inplace)

    yield functional, "dropout", dropout


# ----------------------------------------------------------------------------------- megatron.core


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(name)


def _tracker(device: torch.device) -> Iterator[Patch]:
    """Symptom: _set_cuda_rng_state defers to CUDA's lazy initialisation and so never happens.
    Upstream: megatron/core/tensor_parallel/random.py. On meta there is no state to keep: reading it
    needs data, and nothing random is ever drawn.
    Remove when: Megatron asks torch.accelerator."""
    random = _module("megatron.core.tensor_parallel.random")
    # It warns once per dropout that the CPU's state changed: one generator plays both parts here.
    yield logging.getLogger(random.__name__), "disabled", True
    if device.type == "cpu":
        yield random, "_set_cuda_rng_state", lambda state, *a, **k: torch.set_rng_state(state)
        return
    yield random.CudaRNGStatesTracker, "fork", lambda self, *a: contextlib.nullcontext()
    yield random, "_get_all_rng_states", lambda: generator_states() or (None, None, None)
    yield random, "_set_all_rng_states", lambda *states: generator_states()


def _te_names(device: torch.device) -> Iterator[Patch]:
    """Symptom: NameError: FP8GlobalStateManager in recompute of layernorm, moe_act, mla_up_proj.
    Upstream: CheckpointWithoutOutput sets `self.fp8 = fp8 is not None`, true for the default False.
    Remove when: it reads `bool(fp8)`."""
    random = _module("megatron.core.tensor_parallel.random")
    if random.HAVE_TE:
        return
    yield random, "activation_recompute_forward", lambda **kwargs: contextlib.nullcontext()
    yield random, "fp8_autocast", lambda **kwargs: contextlib.nullcontext()
    no_fp8 = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    yield random, "FP8GlobalStateManager", no_fp8


def _inference_layers(device: torch.device) -> Iterator[Patch]:
    """Symptom: TypeError: isinstance() arg 2 must be a type, building a model with MTP.
    Upstream: tensor_parallel/inference_layers.py `is_inference_column_parallel_linear` (main of
    August 2026); without TE its classes derive from a mock, and so are mocks.
    Remove when: it returns False without TE."""
    from megatron_autorecompute.compat import versions

    lacks_te = not _module("megatron.core.tensor_parallel.random").HAVE_TE
    if lacks_te and versions.asks_for_inference_layers():
        prediction = _module("megatron.core.transformer.multi_token_prediction")
        yield prediction, "is_inference_column_parallel_linear", lambda module: False


def _share_storage(device: torch.device) -> Iterator[Patch]:
    """Symptom: the first CheckpointWithoutOutput backward compiles C++ for 20 s (g++ and ninja).
    Upstream: megatron/core/tensor_parallel/random.py `_get_share_storage` (0.17 and later). The
    stand-in copies, as 0.16 does; a running LiveBytes counts the bytes once, as a device has them.
    Remove when: Megatron shares storages without a compiler."""
    from megatron_autorecompute.compat import versions

    random = _module("megatron.core.tensor_parallel.random")
    if versions.compiles_shared_storage():
        yield random, "_get_share_storage", lambda: share_storage


def share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Give dst's storage (resized to 0 before) the bytes of src's storage."""
    source = src.untyped_storage()
    target = dst.untyped_storage()
    count_once(target, source)
    target.resize_(source.size())
    target.copy_(source)


def _norm_under_sequence_parallel(device: torch.device) -> Iterator[Patch]:
    """Symptom: AssertionError: sequence parallel not supported by torch LayerNorm.
    Upstream: WrappedTorchNorm, used where Apex and TE are missing. Gradients only need the mark
    `sequence_parallel` on the parameters, as finalize_model_grads looks for it.
    Remove when: WrappedTorchNorm sets that mark."""
    norm = _module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    original = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module: torch.nn.Module = original(cls, plain, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module

    yield norm, "__new__", new


def _moe(device: torch.device) -> Iterator[Patch]:
    """Symptom: NameError: te_general_gemm (0.16); split sizes that are tensors, not integers.
    Upstream: megatron/core/transformer/moe/moe_utils.py; maybe_move_tensor_to_cpu converts to numpy
    only what is on CUDA, and token_dispatcher imports it by name.
    Remove when: 0.16 is dropped; the conversion looks at as_numpy alone."""
    from megatron_autorecompute.compat import versions

    utils = _module("megatron.core.transformer.moe.moe_utils")
    dispatcher = _module("megatron.core.transformer.moe.token_dispatcher")
    for owner, name in versions.unbound_te_names():
        yield owner, name, None

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (utils, dispatcher):
        yield module, "maybe_move_tensor_to_cpu", move


def _kept_by_the_process(device: torch.device) -> Iterator[Patch]:
    """Symptom: "Tensor on device cpu is not on the expected device meta!" in a second run.
    Upstream: the loss scale of auxiliary losses and their log by layer belong to the process.
    Remove when: Megatron keeps both with the model."""
    from megatron_autorecompute.compat import versions

    utils = _module("megatron.core.transformer.moe.moe_utils")
    depths = _module("megatron.core.transformer.multi_token_prediction")
    yield utils.MoEAuxLossAutoScaler, "main_loss_backward_scale", None
    yield depths.MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0)
    yield depths.MTPLossLoggingHelper, "tracker", {}
    sparse = _module("megatron.core.transformer.experimental_attention_variant.dsa")
    yield sparse.DSAIndexerLossAutoScaler, "main_loss_backward_scale", None
    yield sparse.DSAIndexerLossLoggingHelper, "tracker", {}
    yield versions.auxiliary_loss_log()


def _even_routing(device: torch.device) -> Iterator[Patch]:
    """Symptom: aten::masked_select, .tolist(), .numpy() and .cpu() fail on meta: no data to count.
    Upstream: MoEAlltoAllTokenDispatcher and MoEAllGatherTokenDispatcher count each expert's tokens
    and permute by them. On meta every token goes to the next top-k experts in turn, counted by
    Megatron on a real map on CPU. Remove when: never; a meta step has to assume a routing."""
    if device.type != "meta":
        return
    module = _module("megatron.core.transformer.moe.token_dispatcher")
    to_all, gathering = module.MoEAlltoAllTokenDispatcher, module.MoEAllGatherTokenDispatcher
    original_preprocess, original_permute = to_all.preprocess, module.permute
    original_postprocess = gathering.dispatch_postprocess

    @functools.wraps(original_preprocess)
    def preprocess(self: Any, routing_map: torch.Tensor) -> Any:
        with patched(torch.cuda, "current_device", lambda: torch.device("cpu")):
            return original_preprocess(self, _even_map(self.config, routing_map))

    @functools.wraps(original_postprocess)
    def dispatch_postprocess(self: Any, *args: Any) -> Any:
        counts = _even_map(self.config, self.routing_map)[:, self.local_expert_indices].sum(0)
        with (
            patched(torch.Tensor, "cpu", lambda _: counts),
            patched(torch.Tensor, "masked_select", _select(int(counts.sum()))),
        ):
            return original_postprocess(self, *args)

    @functools.wraps(original_permute)
    def permute(*args: Any, num_out_tokens: int, **kwargs: Any) -> Any:
        with patched(torch.Tensor, "masked_select", _select(int(num_out_tokens))):
            return original_permute(*args, num_out_tokens=int(num_out_tokens), **kwargs)

    original_sort = module.sort_chunks_by_idxs

    @functools.wraps(original_sort)
    def sort(
        input: torch.Tensor, split_sizes: Any, sorted_idxs: Any, probs: Any = None, **how: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if how.get("fused"):
            return cast(Any, original_sort(input, split_sizes, sorted_idxs, probs, **how))
        sizes = split_sizes.tolist()
        return _sorted(input, sizes), None if probs is None else _sorted(probs, sizes)

    yield to_all, "preprocess", preprocess
    yield gathering, "dispatch_postprocess", dispatch_postprocess
    yield module, "permute", permute
    yield module, "sort_chunks_by_idxs", sort


def _even_map(config: Any, like: torch.Tensor) -> torch.Tensor:
    """A routing map [tokens, experts] on CPU."""
    tokens, experts = like.shape
    chosen = torch.arange(tokens * config.moe_router_topk, device="cpu") % experts
    even = torch.zeros(tokens, experts, dtype=torch.bool, device="cpu")
    return even.scatter_(1, chosen.view(tokens, -1), True)


def _offload(device: torch.device) -> Iterator[Patch]:
    """Symptom: "TE CPU offload is not available"; nothing leaves, as tensors are not on CUDA; a
    table of what was offloaded is printed in the middle of the output.
    Upstream: fine_grained_activation_offload.py. On meta what leaves is freed, and what comes back
    is made anew, in no time. Remove when: never; a meta step has no host memory."""
    if device.type != "meta":
        return
    from megatron_autorecompute.compat.offload_modules import has_no_next_group

    offload = _module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    handler = offload.ChunkOffloadHandler
    engine = types.SimpleNamespace(CPUOffloadEnabled=False)
    yield _module("megatron.core.extensions.transformer_engine"), "cpu_offload", engine
    yield offload, "print_offload_summary_table", lambda total_bytes: None
    yield offload.PipelineOffloadManager, "OFFLOAD_MGR", None
    yield handler, "offload", lambda _, source, **__: _left(source)
    yield handler, "reload", lambda _, left: torch.empty(left[0], dtype=left[1], device=device)
    yield handler, "finish_all_groups", has_no_next_group
    if hasattr(handler, "_can_manage_tensor_for_offload"):
        managed = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
        yield handler, "_can_manage_tensor_for_offload", managed


def _left(source: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    if not source.is_contiguous():  # what is copied is contiguous
        torch.empty_like(source, memory_format=torch.contiguous_format)
    return source.shape, source.dtype


def _sorted(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Chunks of rows in another order, of which there are hundreds: what a view of each and `cat`
    take, and in the backward a slice for each and `cat`."""

    def run(rows: torch.Tensor) -> Ran:
        return concatenated(rows[: max(sizes)], len(rows)), (), backward

    def backward(_: Saved, gradient: torch.Tensor) -> Gradients:
        host_operations(len(sizes) - 1)
        return run(gradient)[:1]

    return cast(torch.Tensor, kernel_with_backward(run, rows))


def _select(count: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """`masked_select` of meta tensors that finds `count`; saves what the real one saves."""

    def run(source: torch.Tensor, mask: torch.Tensor) -> Ran:
        return source.new_empty(count), (source, mask), backward

    def backward(saved: Saved, _: torch.Tensor) -> Gradients:
        return torch.zeros_like(saved[0]), None

    return lambda source, mask: kernel_with_backward(run, source, mask)


def _mla(device: torch.device) -> Iterator[Patch]:
    """Symptom: isinstance() arg 2 must be a type (0.16); DotProductAttention refuses k_channels.
    Upstream: MultiLatentAttention (0.16 imports names of TE that are None and believes them);
    DotProductAttention.__init__ knows neither k_channels nor v_channels, which MLA passes.
    Remove when: 0.16 is dropped; the local attention takes the two arguments."""
    mla = _module("megatron.core.transformer.multi_latent_attention")
    if not _module("megatron.core.extensions.transformer_engine").HAVE_TE:
        yield mla, "HAVE_TE", False
    attention = _module("megatron.core.transformer.dot_product_attention").DotProductAttention
    original = attention.__init__

    @functools.wraps(original)
    def init(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kw: Any,
    ) -> None:
        original(self, *args, **kw)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if k_channels is not None:
            self.hidden_size_per_attention_head = k_channels

    yield attention, "__init__", init


# ------------------------------------------------------------------------------- megatron.training


def _machine(device: torch.device) -> Iterator[Patch]:
    """Symptom: no model parallel initialisation, no TP seed; "Found no NVIDIA driver" in arguments.
    Upstream: megatron/training initialize.py (gates both on device_count() > 0) and arguments.py
    (9.0 answers as Hopper would, where CUDA_DEVICE_MAX_CONNECTIONS is still checked for TP).
    Remove when: megatron.training accepts a machine without CUDA."""
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=0, multi_processor_count=1
    )
    yield torch.cuda, "device_count", _answers(1)
    yield torch.cuda, "set_device", _answers(None)
    yield torch.cuda, "get_device_properties", _answers(properties)
    yield torch.cuda, "get_device_capability", _answers((9, 0))


def _training_start(device: torch.device) -> Iterator[Patch]:
    """Symptom: "Megatron requires CUDA"; device_id is refused by gloo; warm-up on device="cuda".
    Upstream: megatron/training/training.py `pretrain` calls initialize_megatron without
    allow_no_cuda; _initialize_distributed passes device_id=cuda:N unless torch.distributed is
    already initialised; compile_helpers runs a Makefile that the wheels do not have.
    Remove when: pretrain passes allow_no_cuda on."""
    training = _module("megatron.training.training")
    original = training.initialize_megatron

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    yield training, "initialize_megatron", initialize_megatron
    yield training, "set_jit_fusion_options", lambda *args, **kwargs: None
    yield _module("megatron.core.datasets.utils"), "compile_helpers", lambda: None


# In this order: torch first, because importing megatron already needs some of it.
_PATCHES: tuple[Callable[[torch.device], Iterator[Patch]], ...] = (
    _typing_override,
    _of_cuda,
    _device_literals,
    _tensor_type,
    _dropout,
    _tracker,
    _te_names,
    _inference_layers,
    _share_storage,
    _norm_under_sequence_parallel,
    _moe,
    _kept_by_the_process,
    _even_routing,
    _offload,
    _mla,
)
_TRAINING: tuple[Callable[[torch.device], Iterator[Patch]], ...] = (_machine, _training_start)


@contextlib.contextmanager
def deterministic(mode: bool) -> Iterator[None]:
    """torch's algorithms of that mode in the block, with which Megatron keeps other tensors:
    experts' outputs are added up by `index_add_`, which saves them (transformer/moe/moe_utils.py
    `unpermute`). Afterwards they are as they were, and so are the environment's variables."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        with unchanged_environ():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
