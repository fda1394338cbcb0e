"""A pytest plugin: this package's field is in Megatron's configs, and nobody uses it."""

from __future__ import annotations

from megatron_autorecompute.runtime import config_field


def pytest_configure() -> None:
    """Before any test is imported."""
    config_field.install()
