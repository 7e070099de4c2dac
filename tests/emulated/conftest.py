"""Run the emulated tests in a process of their own.

The device, its kernels and the patches in torch are global to a process. When these tests are
collected together with others, only ``test_in_own_process.py`` is: it runs each of the other files
here by a pytest of its own. When they alone are asked for (``pytest tests/emulated/...``), they run
directly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OWN_PROCESS = "AUTOPLACE_EMULATED_TESTS"  # set by test_in_own_process.py

if str(HERE.parents[1]) not in sys.path:  # so that `tests.emulated` can be imported
    sys.path.insert(0, str(HERE.parents[1]))


def _only_these(config: pytest.Config) -> bool:
    if os.environ.get(OWN_PROCESS):
        return True
    paths = [
        Path(config.invocation_params.dir, a.partition("::")[0]).resolve() for a in config.args
    ]
    return bool(paths) and all(path == HERE or HERE in path.parents for path in paths)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.parent != HERE or collection_path.suffix != ".py":
        return None
    if collection_path.name == "test_in_own_process.py":
        return _only_these(config)
    return True if not _only_these(config) else None


@pytest.fixture
def machine() -> Iterator[object]:
    """A machine with two unequal accelerators, noise off."""
    from tests.emulated import EmulatedMachine
    from tests.emulated.spec import AcceleratorSpec, MachineSpec

    spec = MachineSpec(
        accelerators=(
            AcceleratorSpec(name="fast", memory_bytes=64e6),
            AcceleratorSpec(name="slow", memory_bytes=64e6, flops_per_s=1e11, launch_s=2e-5),
        )
    )
    with EmulatedMachine(spec) as running:
        yield running
