"""`python -m megatron_autorecompute.cli`."""

import sys

from megatron_autorecompute.cli.commands import main

sys.exit(main())
