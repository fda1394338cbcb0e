#!/usr/bin/env python3
"""Compare Megatron's own recompute strategies with ours: the command `compare`; see --help."""

import sys

from megatron_autorecompute.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
