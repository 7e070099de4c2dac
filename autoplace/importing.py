"""Imports of much at once, as a start-up does them."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import a module with the garbage collector paused.

    Importing torch makes objects by the hundred thousand and hardly any garbage; looking for it
    among them takes a sixth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if was_enabled:
            gc.enable()
