"""Presents plans: `timeline` and `data` compute, all other modules render.

A renderer needs only a plan or the computed data.
"""
