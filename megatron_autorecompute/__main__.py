"""`python -m megatron_autorecompute`."""

import sys

from megatron_autorecompute.cli import main

sys.exit(main())
