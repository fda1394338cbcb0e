#!/usr/bin/env python3
"""Train any Megatron Bridge recipe with `model.recompute_policy`; see --help."""

from megatron_autorecompute.bridge_pretrain import main

if __name__ == "__main__":
    main()
