"""Choices with the shortest step, with a proven bound on it."""
