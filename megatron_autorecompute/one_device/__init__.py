"""Measures a job's layers on one device."""
