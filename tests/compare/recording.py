"""What CUDA's allocator would record of a job on CPU: every storage, with the real stacks.

A backward's calls are cut off at the engine, which on CUDA runs in a thread without Python calls.
"""

import inspect
import weakref
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Recording(TorchDispatchMode):
    """Writes allocations and frees into a Recorder; `known` tensors are there already."""

    def __init__(self, recorder, known):
        super().__init__()
        self._recorder, self._live = recorder, {}
        for tensor in known:
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = weakref.ref(storage), None, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf.untyped_storage())
        return result

    def see(self, storage, known_only=False):
        key, size_bytes = storage._cdata, storage.nbytes()
        reference, address, before = self._live.get(key, (None, None, 0))
        if (reference is None and known_only) or (reference and address is None):
            return
        if reference is not None and size_bytes != before:
            self._free(address)
        elif reference is not None:
            return
        reference = reference or weakref.ref(storage, lambda _: self._drop(key))
        self._recorder.time_us += 10
        self._live[key] = reference, self._recorder.alloc(size_bytes, _stack()), size_bytes

    def _drop(self, key):
        _, address, _ = self._live.pop(key)
        self._free(address)

    def _free(self, address):
        self._recorder.time_us += 10
        self._recorder.free(address)


def _stack():
    found, frame = [], inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        code = frame.f_code
        found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


@contextmanager
def recording(recorder, known):
    """Record all that runs inside; `resize_` is no operation that torch dispatches."""
    original = torch.UntypedStorage.resize_
    with Recording(recorder, known) as mode:

        def resize(storage, size_bytes):
            result = original(storage, size_bytes)
            mode.see(storage, known_only=True)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield
