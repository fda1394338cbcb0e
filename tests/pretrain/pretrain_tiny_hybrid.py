"""As pretrain_tiny, with a HybridModel of local layers, by megatron.training's own builder.

Needs --hybrid-layer-pattern.
"""

import sys
from pathlib import Path

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import (
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from pretrain_tiny import datasets, forward_step, say_weights

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.hybrid_models import local_spec, make_runnable

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    make_runnable()
    model = hybrid_config_from_args(args)
    model.hybrid_stack_spec = local_spec()
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    say_weights(args.rank)
