"""For all tests: how hypothesis runs, and that children can be interrupted."""

import signal

from hypothesis import settings

# An example takes as long as the machine is busy; pytest-timeout catches what hangs.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

# A shell's background job starts with SIGINT ignored, which every child would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
