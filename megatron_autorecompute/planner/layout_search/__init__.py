"""Layers per stage with the shortest step, with a proven bound over all that may be had."""
