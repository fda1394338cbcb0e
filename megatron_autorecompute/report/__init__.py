"""Presents plans: `timeline` and `data` compute, all other modules render.

A renderer needs only the computed data or a plan.
"""
