"""Presents plans and comparisons: `timeline` and `data` compute, all other modules render.

A renderer needs only the computed data or a record (a plan, a comparison).
"""
