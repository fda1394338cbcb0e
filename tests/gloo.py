"""gloo's threads hold a collective's tensors until they next get to run, on a busy machine long
after its end: bytes that are counted in between hang on the scheduler."""

import contextlib

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_autorecompute.patched import patched

COLLECTIVES = (
    *("allreduce", "allgather", "reduce_scatter", "alltoall"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
)
"""Methods of a process group, by their names in torch 2.13 and before."""


class _Done:
    """The work of a collective that has ended."""

    def wait(self, *_) -> bool:
        return True


def _bits(*tensors):
    return [each.reshape(-1).view(torch.uint8) for each in tensors]


@contextlib.contextmanager
def collectives_on_copies():
    """Collectives in this block run at once, on copies of their tensors that nobody counts."""

    def on_copies(usual):
        def collective(group, *args, **kwargs):
            given, form = tree_flatten((args, kwargs))
            with torch.no_grad(), _disable_current_modes():
                copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
                args, kwargs = tree_unflatten(copies, form)
                usual(group, *args, **kwargs).wait()
                for tensor, copied in zip(given, copies, strict=True):
                    # What is only read must not count as changed in place.
                    if isinstance(tensor, torch.Tensor) and not torch.equal(*_bits(tensor, copied)):
                        tensor.copy_(copied)
            return _Done()

        return collective

    group = torch.distributed.ProcessGroup
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(group, name):
                stack.enter_context(patched(group, name, on_copies(getattr(group, name))))
        yield
