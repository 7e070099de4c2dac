"""The emulated tests, run apart from all others (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path != Path(__file__))


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python: use a newer one",
)
@pytest.mark.parametrize("file", FILES)
def test_the_emulated_tests_of_this_file_pass_in_a_process_of_their_own(
    file: str, request: pytest.FixtureRequest
) -> None:
    command = [sys.executable, "-m", "pytest", str(HERE / file), "-q", "-p", "no:cacheprovider"]
    markers = request.config.getoption("-m")
    if markers:
        command += ["-m", markers]
    environment = {**os.environ, "AUTOPLACE_EMULATED_TESTS": "1"}
    run = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    nothing_selected = 5
    if run.returncode not in (0, nothing_selected):
        pytest.fail(f"{' '.join(command)}\n{run.stdout}\n{run.stderr}", pytrace=False)
