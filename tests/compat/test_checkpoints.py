"""Megatron's `tensor_parallel.checkpoint`: replaced at run time, or patched in its sources."""

from megatron_autorecompute.integrations import megatron_lm
from testing.ranks import run_ranks
from tests.default_model import tiny_model
from tests.support import start_parallel, tiny_config


def test_patched_sources_are_not_replaced_and_wrap_functions_all_the_same():
    wrapped, unwrapped = run_ranks(functions_of_checkpoints, 1)[0]
    assert wrapped != "len"
    assert unwrapped == "len"


def functions_of_checkpoints():
    """What the checkpoint of patched sources runs for `len`, under a policy and after it."""
    from megatron.core import tensor_parallel

    from megatron_autorecompute.runtime.apply import apply

    start_parallel()
    called = []

    def original(function, distribute, *args):
        called.append(getattr(function, "__name__", "another"))
        return function(*args)

    patched = tensor_parallel.checkpoint = megatron_lm.with_parts(original)
    with apply("full", tiny_model(tiny_config())):
        assert tensor_parallel.checkpoint is patched
        tensor_parallel.checkpoint(len, False, "abc")
    assert tensor_parallel.checkpoint is patched
    tensor_parallel.checkpoint(len, False, "abc")
    return called
