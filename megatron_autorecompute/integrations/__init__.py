"""Connects this package to training programs, one module each."""
