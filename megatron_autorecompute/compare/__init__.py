"""Runs Megatron's own strategies and ours on this machine, under one budget."""
