"""Local layers, which run on CPU: `pretrain_hybrid.py --spec tests.pretrain.hybrid_spec SPEC`."""

from tests.hybrid_models import local_spec, make_runnable

make_runnable()
SPEC = local_spec()
