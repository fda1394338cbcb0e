"""Fastest choices of one stage under its memory limits, exactly."""
