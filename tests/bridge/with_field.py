"""A pytest plugin for Bridge's own unit tests: Bridge as it is once the field is there.

    PYTHONPATH=tests/bridge pytest -p with_field CHECKOUT/tests/unit_tests/...

A checkout has a package `tests` of its own, so this one is imported by its file's name. It puts in
place what those tests expect of a machine, and our field; nothing else of ours runs in them.
"""

import stand_ins

from megatron_autorecompute.integrations import megatron_bridge

megatron_bridge.install()
stand_ins.install()
