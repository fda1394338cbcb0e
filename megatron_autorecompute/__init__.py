"""Per-layer activation recompute for Megatron-Core: measured, solved, applied.

Importing this package imports neither torch nor megatron and changes nothing.
"""
