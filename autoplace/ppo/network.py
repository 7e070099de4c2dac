"""The actor and the critic: two multilayer perceptrons over one flat buffer.

Every weight, every bias and the running statistics of the observations are views into a single
float32 vector. So a network crosses to another device in one copy, its gradient norm is one
reduction, and its optimiser sees one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplace.workload import NetworkSpec

OBSERVATION_CLAMP = 10.0
_VARIANCE_FLOOR = 1e-8
_ALIGNMENT = 16  # floats: each view starts on a cache line, as BLAS kernels prefer

Layers = tuple[tuple[Tensor, Tensor], ...]


class ActorCritic(nn.Module):
    """Separate tanh networks for the policy and the value.

    Weights start orthogonal with gain sqrt(2) in the hidden layers, 0.01 in the policy head and 1
    in the value head; biases and log standard deviations start at 0 (Andrychowicz et al. 2021
    compare these choices).

    Observations are standardised by statistics that belong to the network, so they travel with its
    weights into the checkpoint, the evaluation and an export. They are frozen while a rollout is
    sampled and learned from, and change only in :meth:`update_statistics`, once per iteration after
    the update: the policy that is optimised is exactly the one that acted, and the first
    minibatch's probability ratio is 1.

    Attributes:
        spec: the sizes.
        normalize_observations: whether observations are standardised.
        flat: the buffer behind everything: ``num_trainable`` parameters, then the statistics.
        num_trainable: length of the part of ``flat`` that is learned (with padding).
    """

    observation_mean: Tensor
    observation_inverse_std: Tensor
    observation_variance: Tensor
    observation_count: Tensor

    def __init__(
        self,
        spec: NetworkSpec,
        *,
        seed: int = 0,
        normalize_observations: bool = False,
        flat: Tensor | None = None,
    ) -> None:
        """Build over ``flat``, or over a new host buffer initialised from ``seed``."""
        super().__init__()
        self.spec = spec
        self.normalize_observations = normalize_observations
        self.num_trainable, size = _buffer_sizes(spec)
        self.flat = torch.zeros(size) if flat is None else flat
        assert self.flat.shape == (size,), (self.flat.shape, size)

        views = _Views(self.flat)
        half = len(spec.layers) // 2
        self.actor = _perceptron(spec.layers[:half], views)
        self.critic = _perceptron(spec.layers[half:], views)
        self.log_std = nn.Parameter(views.take(spec.action_size)) if spec.continuous else None
        for name in ("mean", "inverse_std", "variance"):
            view = views.take(spec.observation_size)
            self.register_buffer(f"observation_{name}", view)
        self.register_buffer("observation_count", views.take(1))
        self.actor_layers = _layers(self.actor)
        self.critic_layers = _layers(self.critic)
        if flat is None:
            self._initialize(seed)

    def over(self, flat: Tensor) -> ActorCritic:
        """The same network over another buffer, on whatever device that is."""
        return ActorCritic(self.spec, normalize_observations=self.normalize_observations, flat=flat)

    def _initialize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layers, head_gain in ((self.actor_layers, 0.01), (self.critic_layers, 1.0)):
                for weight, _ in layers:
                    gain = head_gain if weight is layers[-1][0] else 2.0**0.5
                    nn.init.orthogonal_(weight, gain, generator=generator)
            self.observation_inverse_std.fill_(1.0)
            self.observation_variance.fill_(1.0)

    def normalize(self, observations: Tensor) -> Tensor:
        """Observations as the layers read them: standardised and clamped, or as they are."""
        if not self.normalize_observations:
            return observations
        # The mean is taken off first: a large constant feature must come out as exactly 0.
        centred = observations - self.observation_mean
        return centred.mul_(self.observation_inverse_std).clamp_(
            -OBSERVATION_CLAMP, OBSERVATION_CLAMP
        )

    def policy(self, normalized: Tensor) -> Tensor:
        """Logits ``[B, A]`` of a categorical policy, or means ``[B, A]`` of a Gaussian one."""
        return forward_layers(self.actor_layers, normalized)

    def value(self, normalized: Tensor) -> Tensor:
        """State values ``[B]``."""
        return forward_layers(self.critic_layers, normalized).squeeze(-1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Policy outputs ``[B, A]`` and values ``[B]`` of raw observations ``[B, D]``."""
        normalized = self.normalize(observations)
        return self.policy(normalized), self.value(normalized)

    @torch.no_grad()
    def update_statistics(self, observations: Tensor) -> None:
        """Merge raw observations ``[R, D]`` into the statistics.

        Parallel variance (Chan, Golub and LeVeque 1979, eq. 2.1): with counts a and b, means and
        variances of both sides, and delta the difference of the means,
        ``n = a + b``, ``mean += delta b / n``, ``var = (a var_a + b var_b + delta^2 a b / n) / n``.
        """
        if not self.normalize_observations:
            return
        rows = observations.shape[0]
        variance, mean = torch.var_mean(observations, dim=0, correction=0)
        count = self.observation_count
        total = count + rows
        delta = mean - self.observation_mean
        self.observation_mean.add_(delta * (rows / total))
        spread = self.observation_variance * count + variance * rows
        spread += delta.square_() * (count * rows / total)
        self.observation_variance.copy_(spread.div_(total))
        self.observation_inverse_std.copy_((self.observation_variance + _VARIANCE_FLOOR).rsqrt_())
        self.observation_count.copy_(total)


def forward_layers(layers: Layers, x: Tensor) -> Tensor:
    """Linear layers with a tanh between each two."""
    for weight, bias in layers[:-1]:
        x = F.linear(x, weight, bias).tanh_()
    weight, bias = layers[-1]
    return F.linear(x, weight, bias)


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _buffer_sizes(spec: NetworkSpec) -> tuple[int, int]:
    """(learned, all) floats of a network's buffer, each view padded to the alignment."""
    trainable = sum(_padded(i * o) + _padded(o) for i, o in spec.layers)
    trainable += _padded(spec.action_size) if spec.continuous else 0
    return trainable, trainable + 3 * _padded(spec.observation_size) + _ALIGNMENT


class _Views:
    """Hands out aligned views of a buffer, one after the other."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._start = 0

    def take(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        view = self._flat[self._start : self._start + count].view(shape)
        self._start += _padded(count)
        return view


def _perceptron(sizes: Sequence[tuple[int, int]], views: _Views) -> nn.Sequential:
    modules: list[nn.Module] = []
    for inputs, outputs in sizes:
        linear = nn.Linear(inputs, outputs, device="meta")
        linear.weight = nn.Parameter(views.take(outputs, inputs))
        linear.bias = nn.Parameter(views.take(outputs))
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def _layers(perceptron: nn.Sequential) -> Layers:
    return tuple((m.weight, m.bias) for m in perceptron if isinstance(m, nn.Linear))
