"""Units of bytes for options and printing; the code itself counts whole bytes."""

MIB = 1 << 20
GIB = 1 << 30
MOST_GIB = 1 << 20
"""More than any device has, and far below the limit of the planner's integers."""


def gib(size_bytes: float) -> str:
    """Bytes as GiB with two decimals, or with more decimals for small figures."""
    value = size_bytes / GIB
    return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
