"""Predictions held against every public measurement: `python -m benchmarks.measured`."""
