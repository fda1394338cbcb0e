"""Units of bytes, for what is asked and printed in them; everything inside is whole bytes."""

MIB = 1 << 20
GIB = 1 << 30
MOST_GIB = 1 << 20
"""More than any device has, and far below where the planner's integers end."""
