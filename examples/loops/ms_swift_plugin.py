"""ms-swift's callback `recompute`: `--external_plugins ms_swift_plugin.py --callbacks recompute`.

After the sources of August 2026 (swift/megatron/trainers/base.py). It was not run in ms-swift.
"""

import swift.megatron.trainers.base as base
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map

from megatron_autorecompute import attach


class Recompute(MegatronCallback):
    """Attaches to the trainer's model when the trainer is built."""

    def __init__(self, trainer: object) -> None:
        super().__init__(trainer)
        attach(trainer.wrapped_models, trainer.optimizer, replace_recompute=True).watch(base)


megatron_callbacks_map["recompute"] = Recompute
