"""The emulated tests, run apart from all others (see conftest.py), as many files at a time as CPUs.

What they measure is virtual time, which a busy machine does not change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils import backend_registration

from autoplace.machine import detect_machine

HERE = Path(__file__).parent
# The longest first, so that none of them is left over at the end.
LONGEST = ("test_recover.py", "test_bottleneck.py", "test_held_out.py", "test_schemes.py")
FILES = sorted(
    (path.name for path in HERE.glob("test_*.py") if path != Path(__file__)),
    key=lambda name: (name not in LONGEST, name),
)
NOTHING_SELECTED = 5

Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """The run of each file that was asked for, started or still to be."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    markers = request.config.getoption("-m")
    if markers:
        command += ["-m", markers]
    environment = {**os.environ, "AUTOPLACE_EMULATED_TESTS": "1", "OMP_NUM_THREADS": "1"}

    def run(file: str) -> Run:
        return subprocess.run(
            [*command, str(HERE / file)],
            cwd=HERE.parents[1],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    files = [
        item.callspec.params["file"]
        for item in request.session.items
        if item.path == Path(__file__)
    ]
    with ThreadPoolExecutor(min(detect_machine().usable_cpus, 4)) as pool:
        yield {file: pool.submit(run, file) for file in files}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)  # also waits for the files before it
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python: use a newer one",
)
@pytest.mark.parametrize("file", FILES)
def test_the_emulated_tests_of_this_file_pass_in_a_process_of_their_own(
    file: str, runs: dict[str, Future[Run]]
) -> None:
    run = runs[file].result()
    if run.returncode not in (0, NOTHING_SELECTED):
        pytest.fail(f"{' '.join(run.args)}\n{run.stdout}\n{run.stderr}", pytrace=False)
