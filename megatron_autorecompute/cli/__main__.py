"""`python -m megatron_autorecompute.cli`."""

import sys

from megatron_autorecompute.cli import main

sys.exit(main())
