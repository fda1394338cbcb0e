"""For all tests: how hypothesis runs."""

from hypothesis import settings

# An example takes as long as the machine is busy; pytest-timeout catches what hangs.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
