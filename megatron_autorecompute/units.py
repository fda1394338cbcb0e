"""Units of bytes for options and printing; the code itself counts whole bytes."""

MIB = 1 << 20
GIB = 1 << 30
MOST_GIB = 1 << 20
"""More than any device has, and far below the limit of the planner's integers."""
