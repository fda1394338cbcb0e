"""The model of a test whose subject is no model of its own: a HybridModel where Megatron has one.

GPTModel is deprecated since megatron-core 0.19. So a new test takes its model from here, by one of

    Shape(**layers(4), hidden_size=64, ...)     # a TrainingJob of the comparison
    chunks = tiny_model(tiny_config(...))       # this rank's chunks, as `tiny_gpt` returns them

and gets on megatron-core 0.16 a GPTModel of as many layers. The layers are attention and MLP in
turns: policies of `full` and `none` fit both, and one set of modules for all layers does, too.
Tests about other layers take `tests.hybrid_models`; who may build a GPTModel is listed in
tests/rules/test_default_model.py.
"""

from typing import Any

from tests.hybrid_models import HAVE_HYBRID, hybrid_chunks, runnable
from tests.support import tiny_gpt


def layers(num_layers: int) -> dict[str, Any]:
    """Fields of `comparison.Shape`."""
    if not HAVE_HYBRID:
        return {"num_layers": num_layers}
    return {"hybrid_layer_pattern": _turns("*-", num_layers)}


def flags(num_layers: int) -> list[str]:
    """The same for `megatron-autorecompute compare`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in layers(num_layers).items()]


def tiny_model(config: Any) -> list[Any]:
    """This rank's chunks for a dense or a "moe" `tiny_config`, MTP depths included; weights depend
    on the parameter's name and the global layer number alone."""
    if not HAVE_HYBRID:
        return tiny_gpt(config)
    block = "*E" if config.num_moe_experts else "*-"
    chunks = config.pipeline_model_parallel_size * (
        config.virtual_pipeline_model_parallel_size or 1
    )
    symbols, each = _turns(block, config.num_layers), config.num_layers // chunks
    segments = [symbols[at : at + each] for at in range(0, config.num_layers, each)]
    pattern = "/".join(["|".join(segments), *[block] * (config.mtp_num_layers or 0)])
    config.is_hybrid_model = True
    with runnable():
        return hybrid_chunks(config, pattern, position_embedding_type="learned_absolute")


def _turns(block: str, num_layers: int) -> str:
    return (block * num_layers)[:num_layers]
