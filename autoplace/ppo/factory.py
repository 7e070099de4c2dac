"""A user's own network, from ``path/to/file.py:function``.

The function is called with the :class:`autoplace.workload.NetworkSpec` (``action_size``,
``vector_size``, ``images``, ...) and returns an ``nn.Module``. The module is called with a batch of
observations and returns ``(policy outputs [B, action_size], values [B])``:

- without images the observations are one float32 tensor ``[B, observation_size]``, standardised
  where that is on;
- with a single image and nothing else, one tensor ``[B, C, H, W]`` from 0 to 1;
- with more, a dict: each image by its key, the numbers beside them as ``"vector"``.

Policy outputs are the logits of all heads side by side, or the means of a Gaussian policy, whose
standard deviations are kept beside the module. A module must not change while it is called: no
dropout, no batch statistics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from autoplace.errors import AutoplaceError, UsageError
from autoplace.files import load_module
from autoplace.ppo.encoder import rows_apart
from autoplace.workload import NetworkSpec

Factory = Callable[[NetworkSpec], nn.Module]


def make_own_network(spec: NetworkSpec, *, seed: int = 0) -> nn.Module:
    """What the factory of ``spec`` makes, with the weights that ``seed`` gives.

    Raises:
        UsageError: the factory does not exist, fails, or makes no module.
    """
    factory = _load(spec.factory)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        try:
            module = factory(spec)
        except AutoplaceError:
            raise
        except Exception as error:
            raise UsageError(
                f"{spec.factory} cannot make a network: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"--network makes a torch.nn.Module, got {type(module).__name__} from {spec.factory}: "
            "return one"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype != torch.float32:
            raise UsageError(
                f"the weights and buffers of a network are float32, but {name} of {spec.factory} "
                f"is {tensor.dtype}: convert it"
            )
    return module


def own_network_spec(spec: NetworkSpec, factory: str) -> NetworkSpec:
    """``spec`` with the user's own network in place of the built-in one, tried on two rows.

    Raises:
        UsageError: the network does not do what its contract says.
    """
    spec = dataclasses.replace(spec, factory=factory)
    module = make_own_network(spec)
    count = sum(parameter.numel() for parameter in module.parameters())
    if count == 0:
        raise UsageError(f"a network has weights to learn, {factory} has none: add a layer")
    rows = torch.zeros(2, spec.observation_size, dtype=getattr(torch, spec.observation_dtype))
    vector, images = rows_apart(rows, spec)
    try:
        with torch.no_grad():
            found = module(own_inputs(vector, images, spec))
    except Exception as error:
        raise UsageError(
            f"{factory} cannot read observations: {type(error).__name__}: {error}"
        ) from error
    expected = f"policy outputs (2, {spec.action_size}) and values (2,) of two observations"
    is_pair = isinstance(found, tuple) and len(found) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in found):
        raise UsageError(f"a network gives {expected}, {factory} gave {type(found).__name__}")
    shapes = [tuple(part.shape) for part in found]
    if shapes != [(2, spec.action_size), (2,)]:
        raise UsageError(
            f"a network gives {expected}, {factory} gave {shapes[0]} and {shapes[1]}: mend its "
            "last layers"
        )
    return dataclasses.replace(spec, factory_parameters=count)


def own_inputs(
    vector: Tensor | None, images: Sequence[Tensor], spec: NetworkSpec
) -> Tensor | dict[str, Tensor]:
    """What a user's own network is called with, see the head of this file."""
    if not spec.images:
        assert vector is not None
        return vector
    if vector is None and len(images) == 1:
        return images[0]
    named = {image.key: pixels for image, pixels in zip(spec.images, images, strict=True)}
    return named if vector is None else {**named, "vector": vector}


@functools.lru_cache(maxsize=8)
def _load(name: str) -> Factory:
    path_text, _, function = name.rpartition(":")
    path = Path(path_text)
    if not path_text.endswith(".py") or not function:
        raise UsageError(f"--network is path/to/file.py:function, got {name!r}: name one so")
    if not path.is_file():
        raise UsageError(f"there is no file {path}: name one as path/to/file.py:make_network")
    try:
        module = load_module(path, "autoplace_network")
    except Exception as error:
        raise UsageError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"{path} has no function {function!r}: define it, or name another")
    return found  # type: ignore[no-any-return]
