"""A trained policy as an ONNX file: observations as the environment returns them in, actions out.

Everything between the two is part of the graph: one-hot encoding, standardising by the statistics
of the run, the network, the choice of the action, the bounds of the action space.

======================  ===========================  ==============================================
name                    shape, type                  what it is
======================  ===========================  ==============================================
``observation``         ``[B, *shape]``              a stack of observations; of a Dict or Tuple an
                                                     input per part, named after the way to it
                                                     (``inner.gear``). Images are uint8, choices
                                                     int64, everything else float32
``action``              ``[B]``, ``[B, *shape]``     the most probable action, or the mean: as the
                                                     environment takes it
``logits``              ``[B, A]`` float32           of a categorical policy, head by head
``mean``, ``std``       ``[B, A]`` float32           of a Gaussian policy, before any clipping
======================  ===========================  ==============================================
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from autoplace._version import __version__
from autoplace.envs import make_env
from autoplace.envs.spaces import Leaf
from autoplace.errors import RunError, UsageError
from autoplace.files import one_line, write_bytes_atomic
from autoplace.ppo.distribution import most_probable
from autoplace.train.policy import Policy, load_policy

PARITY_TOLERANCE = 1e-5  # absolute below 1, relative above
_PARITY_ROWS = 64
_ONLY_INPUT = "observation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was written, and how far it is from the policy that it was made from.

    Attributes:
        path: the file.
        inputs: (name, element type) of each input, batch axis first.
        outputs: names of the outputs.
        parity_error: largest difference of any output from the policy's own on observations of the
            environment, relative above 1; ``None`` where onnxruntime is not installed.
        parity_rows: how many observations were compared.
    """

    path: Path
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    parity_error: float | None
    parity_rows: int

    def to_json(self) -> dict[str, Any]:
        """As ``autoplace export --json`` prints it."""
        return {
            "path": str(self.path),
            "inputs": [{"name": name, "type": kind} for name, kind in self.inputs],
            "outputs": list(self.outputs),
            "parity_error": self.parity_error,
            "parity_rows": self.parity_rows,
        }


def export_onnx(run_dir: Path | str, output: Path | str) -> ExportResult:
    """Write the policy of a run's newest readable checkpoint as one ONNX file.

    Where onnxruntime is installed, the graph is run on observations of the environment. Nothing is
    written unless it gives what the policy gives within :data:`PARITY_TOLERANCE`.

    Raises:
        UsageError: onnx or onnxscript, which torch's exporter needs, are not installed.
        RunError: there is no checkpoint, the network cannot be exported, or the graph computes
            something else than the policy.
        EnvError: its environment cannot be made here.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"an export needs the package {missing[0]}, which is not installed: "
            "pip install 'autoplace[onnx]'"
        )
    policy, path = load_policy(run_dir), Path(output)
    graph = PolicyGraph(policy)
    samples = _samples(policy, _PARITY_ROWS)
    content = _to_onnx(graph, samples, policy)
    error, compared = None, 0
    if importlib.util.find_spec("onnxruntime") is not None:
        error, compared = parity_error(content, policy, samples), _PARITY_ROWS
        if not error <= PARITY_TOLERANCE:
            raise RunError(
                f"the exported graph differs from the policy by {error:.2g}, more than "
                f"{PARITY_TOLERANCE:g}: nothing was written; try another version of torch or onnx"
            )
    write_bytes_atomic(path, content)
    kinds = (str(part.dtype).removeprefix("torch.") for part in samples.parts)
    return ExportResult(
        path=path,
        inputs=tuple(zip(graph.input_names, kinds, strict=True)),
        outputs=graph.output_names,
        parity_error=error,
        parity_rows=compared,
    )


class Samples(NamedTuple):
    """The same observations as the graph takes them, and as rows for the network.

    Attributes:
        parts: ``[B, *shape]`` for each part of an observation.
        rows: ``[B, D]``.
    """

    parts: tuple[Tensor, ...]
    rows: np.ndarray


class PolicyGraph(nn.Module):
    """What the file computes, in operations that every ONNX runtime has.

    Attributes:
        input_names: one for each part of an observation.
        output_names: of what :meth:`forward` returns.
    """

    low: Tensor | None
    high: Tensor | None
    firsts: Tensor | None

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._network = policy.network
        self._leaves = policy.description.observations.leaves
        self._actions = policy.description.actions
        self.input_names = tuple(leaf.key or _ONLY_INPUT for leaf in self._leaves)
        self.output_names = (
            ("action", "mean", "std") if self._actions.continuous else ("action", "logits")
        )
        for name in ("low", "high", "firsts"):
            bound = getattr(self._actions, name)
            self.register_buffer(name, None if bound is None else torch.as_tensor(bound))

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Actions and the parameters of their distribution, for a stack of observations."""
        numbers, images = [], []
        for leaf, part in zip(self._leaves, parts, strict=True):
            if leaf.image is not None:
                images.append(_pixels(leaf, part))
            elif leaf.counts:
                numbers += _one_hot(leaf, part)
            else:
                numbers.append(part.reshape(-1, leaf.size))
        vector = self._network.standardize(torch.cat(numbers, 1)) if numbers else None
        outputs = self._network.policy_of_parts(vector, images)
        if not self._actions.continuous:
            return self._choices(outputs), outputs
        log_std = self._network.log_std
        assert log_std is not None
        return self._clipped(outputs), outputs, log_std.exp().expand_as(outputs)

    def _choices(self, logits: Tensor) -> Tensor:
        heads = self._actions.heads
        if not heads:
            return logits.argmax(-1) + self._actions.first
        chosen = torch.stack([head.argmax(-1) for head in torch.split(logits, list(heads), -1)], -1)
        if self.firsts is not None:
            chosen = chosen + self.firsts
        dtype = getattr(torch, self._actions.dtype)
        return chosen.reshape(-1, *self._actions.shape).to(dtype)

    def _clipped(self, means: Tensor) -> Tensor:
        if self.low is not None:
            means = torch.maximum(means, self.low)
        if self.high is not None:
            means = torch.minimum(means, self.high)
        dtype = getattr(torch, self._actions.dtype)
        return means.reshape(-1, *self._actions.shape).to(dtype)


def _pixels(leaf: Leaf, part: Tensor) -> Tensor:
    image = leaf.image
    assert image is not None
    if image.channels_first:
        pixels = part.reshape(-1, image.channels, image.height, image.width)
    else:
        pixels = part.reshape(-1, image.height, image.width, image.channels).permute(0, 3, 1, 2)
    return pixels.to(torch.float32) * (1.0 / image.high)


def _one_hot(leaf: Leaf, part: Tensor) -> list[Tensor]:
    """``[B, count]`` for each choice of a part."""
    choices = part.reshape(-1, len(leaf.counts))
    return [
        (choices[:, index, None] - first == torch.arange(count)).to(torch.float32)
        for index, (first, count) in enumerate(zip(leaf.firsts, leaf.counts, strict=True))
    ]


# --------------------------------------------------------------------------------------------------
# The file


def _to_onnx(graph: PolicyGraph, samples: Samples, policy: Policy) -> bytes:
    batch = torch.export.Dim("batch")
    with _quietly(), torch.no_grad():
        try:
            program = torch.onnx.export(
                graph.eval(),
                samples.parts,
                input_names=list(graph.input_names),
                output_names=list(graph.output_names),
                dynamic_shapes=(tuple({0: batch} for _ in samples.parts),),
                dynamo=True,
                verbose=False,
                external_data=False,
            )
        except Exception as error:  # whatever the exporter raises about a user's own network
            raise RunError(
                f"the network cannot be exported ({type(error).__name__}: {one_line(error)}): "
                "build it of operations that torch.onnx supports"
            ) from error
    assert program is not None
    model = program.model_proto
    about = {
        "autoplace_version": __version__,
        "env": policy.description.env.id,
        "env_steps": policy.env_steps,
        "action_heads": list(policy.description.actions.heads),
    }
    for key, value in about.items():
        text = value if isinstance(value, str) else json.dumps(value)
        model.metadata_props.add(key=key, value=text)
    return bytes(model.SerializeToString())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the exporter's progress and its deprecations to itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --------------------------------------------------------------------------------------------------
# Parity


def parity_error(content: bytes, policy: Policy, samples: Samples) -> float:
    """Largest difference between a graph's outputs and the policy's own, relative above 1.

    An action is compared with the one that follows from the graph's own logits or means: where two
    logits tie within rounding, either is right.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    feeds = {name: part.numpy() for name, part in zip(names, samples.parts, strict=True)}
    action, outputs, *std = session.run(None, feeds)
    network, spec = policy.network, policy.network.spec
    with torch.inference_mode():
        expected = network.policy(network.normalize(torch.from_numpy(samples.rows)))
    errors = [_difference(outputs, expected.numpy())]
    chosen = outputs
    if network.log_std is not None:
        errors.append(_difference(std[0], network.log_std.detach().exp().expand_as(expected)))
    else:
        chosen = most_probable(torch.from_numpy(outputs), spec.action_heads).numpy()
    errors.append(_difference(action, policy.description.actions.decode(chosen)))
    return max(errors)


def _difference(found: np.ndarray, expected: object) -> float:
    exact = np.asarray(expected, np.float64)
    if found.shape != exact.shape:
        return math.inf
    return float((np.abs(found - exact) / np.maximum(1.0, np.abs(exact))).max())


def _samples(policy: Policy, count: int) -> Samples:
    """Observations of the environment under random actions."""
    codec = policy.description.observations
    rows = np.zeros((count, codec.size), codec.dtype)
    kept: list[list[np.ndarray]] = [[] for _ in codec.leaves]
    env = make_env(policy.description.env)
    try:
        env.action_space.seed(0)
        observation, _ = env.reset(seed=0)
        for row in rows:
            codec.write(row, observation)
            for leaf, values in zip(codec.leaves, kept, strict=True):
                values.append(np.array(leaf.of(observation)))
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                observation, _ = env.reset()
    finally:
        env.close()
    parts = tuple(
        torch.from_numpy(np.stack(values).astype(_input_dtype(leaf)))
        for leaf, values in zip(codec.leaves, kept, strict=True)
    )
    return Samples(parts, rows)


def _input_dtype(leaf: Leaf) -> str:
    if leaf.image is not None:
        return "uint8"
    return "int64" if leaf.counts else "float32"
