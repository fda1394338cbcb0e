"""The config field by its public address."""

from megatron_autorecompute.runtime.config_field import install, uninstall

__all__ = ["install", "uninstall"]
