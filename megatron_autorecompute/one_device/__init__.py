"""Measures one rank's layers of a job on one device, with collectives that move no data."""
