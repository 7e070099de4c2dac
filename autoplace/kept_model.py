"""The cost model of this machine's calibration, kept so that nothing is fitted twice.

What is kept are the numbers that fitting found (:mod:`autoplace.model_parameters`), in a file
beside the stored calibration. They hold for exactly these timings, fitted by exactly this code with
these libraries; for anything else, and where the file is damaged, they are fitted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from importlib import metadata
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from autoplace import store
from autoplace._version import __version__
from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.errors import AutoplaceError
from autoplace.measurement import Calibration
from autoplace.model_parameters import ModelParameters

log = logging.getLogger(__name__)

# Modules on which it depends what is fitted.
_CODE = (
    "engines",
    "workload",
    "measurement",
    "products",
    "physics",
    "model_parameters",
    "correction",
    "fit_products",
    "rates",
    "standard_errors",
    "fitting",
)
_LIBRARIES = ("scikit-learn", "scipy")
_SUFFIX = ".model.json"  # of the file, in place of the calibration's ".json"


def cost_model_of(calibration: Calibration) -> CostModel:
    """The cost model of a calibration: the kept one where there is one, else fitted.

    One that was fitted to this machine's stored calibration is kept.

    Raises:
        CalibrationError: the calibration lacks the basic timings of one of its devices.
    """
    path = store.calibration_path(calibration.machine).with_suffix(_SUFFIX)
    stored = store.stored_path(calibration.machine)
    conditions = _conditions(calibration)
    for kept in dict.fromkeys((path, stored.with_suffix(_SUFFIX))):
        parameters = _read(kept, conditions)
        if parameters is not None:
            with threadpool_limits(limits=1, user_api="blas"):  # as in fitting
                return CostModel(calibration, parameters)
    model = fit_cost_model(calibration)
    if stored.exists() and all(m.origin == "measured" for m in calibration.measurements):
        found = model.parameters.to_json()
        try:
            store.write_json_atomic(path, {"key": _key(conditions, found), "parameters": found})
        except AutoplaceError as fault:  # fitted again the next time
            log.debug("%s", fault)
    return model


def _read(path: Path, conditions: bytes) -> ModelParameters | None:
    if not path.exists():
        return None
    try:
        data = store.read_json_object(path, "cost model")
    except AutoplaceError as fault:
        log.debug("%s", fault)
        return None
    parameters = data.get("parameters")
    if not isinstance(parameters, dict) or data.get("key") != _key(conditions, parameters):
        return None
    return ModelParameters.from_json(parameters)


def _key(conditions: bytes, parameters: object) -> str:
    return hashlib.sha256(conditions + json.dumps(parameters).encode()).hexdigest()


def _conditions(calibration: Calibration) -> bytes:
    """A digest of the timings, and of what fits them."""
    versions = [__version__, np.__version__, *map(metadata.version, _LIBRARIES)]
    timings = [calibration.origin, calibration.measurements]
    digest = hashlib.sha256(repr([versions, timings]).encode())
    for module in _CODE:
        with contextlib.suppress(OSError):  # installed without its source: the version has to do
            digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.digest()
