"""Megatron's `tensor_parallel.checkpoint`: replaced at run time, or patched in its sources."""

import pytest

from megatron_autorecompute.integrations import megatron_lm
from tests.default_model import tiny_model
from tests.support import tiny_config

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning"),
    pytest.mark.filterwarnings("ignore:MimoModelConfig is experimental:UserWarning"),
]


def test_patched_sources_are_not_replaced_and_wrap_functions_all_the_same(monkeypatch):
    from megatron.core import tensor_parallel

    from megatron_autorecompute.runtime.apply import apply

    called = []

    def original(function, distribute, *args):
        called.append(function)
        return function(*args)

    patched = megatron_lm.with_parts(original)
    monkeypatch.setattr(tensor_parallel, "checkpoint", patched)
    with apply("full", tiny_model(tiny_config())):
        assert tensor_parallel.checkpoint is patched
        tensor_parallel.checkpoint(len, False, "abc")
    assert tensor_parallel.checkpoint is patched
    tensor_parallel.checkpoint(len, False, "abc")
    assert called[0] is not len
    assert called[1] is len
