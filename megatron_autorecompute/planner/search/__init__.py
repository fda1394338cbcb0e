"""The one search for a plan: see `step`."""
