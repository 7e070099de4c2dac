"""Measure a machine once, then place every PPO run where it is fastest, and say why."""

from autoplace._version import __version__

__all__ = ["__version__"]
