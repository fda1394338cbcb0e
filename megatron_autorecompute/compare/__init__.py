"""Megatron's own strategies and ours, run on this machine under one budget."""
