#!/usr/bin/env python3
"""Compare Megatron's own recompute strategies with ours; see --help."""

import sys

from megatron_autorecompute.compare.run import main

if __name__ == "__main__":
    sys.exit(main())
