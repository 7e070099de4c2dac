"""The actor and the critic over one flat buffer.

They are two multilayer perceptrons apart; with images both read the features of one encoder, and a
user's own network does what it does.

Every weight, every bias and the running statistics of the observations are views into a single
float32 vector. So a network crosses to another device in one copy, its gradient norm is one
reduction, and its optimiser sees one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplace.engines import EAGER, NUMPY, engine_on
from autoplace.ppo.encoder import Encoder, rows_apart, vector_part
from autoplace.ppo.factory import make_own_network, own_inputs
from autoplace.ppo.numpy_perceptron import NumpyPerceptron
from autoplace.ppo.numpy_policy import OBSERVATION_CLAMP
from autoplace.workload import NetworkSpec

_VARIANCE_FLOOR = 1e-8
_ALIGNMENT = 16  # floats: each view starts on a cache line, as BLAS kernels prefer

Layers = tuple[tuple[Tensor, Tensor], ...]


class ActorCritic(nn.Module):
    """Separate tanh networks for the policy and the value, behind a shared encoder of images.

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
        normalize_observations: whether observations are standardised (images never are).
        engine: of the placement, see :mod:`autoplace.engines`.
        engine_here: what that means on the device of this network.
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
        engine: str = EAGER,
        flat: Tensor | None = None,
    ) -> None:
        """Build over ``flat``, or over a new host buffer initialised from ``seed``."""
        super().__init__()
        self.spec = spec
        self.normalize_observations = normalize_observations
        self.engine = engine
        own = make_own_network(spec, seed=seed) if spec.factory else None
        self.num_trainable, size = _buffer_sizes(spec, own)
        self.flat = torch.zeros(size) if flat is None else flat
        assert self.flat.shape == (size,), (self.flat.shape, size)
        device = self.flat.device.type
        self.engine_here = engine_on(engine, device, is_plain=spec.is_plain)

        views = _Views(self.flat)
        self.own, self.encoder = own, None
        if own is not None:
            _move_into(own.parameters(), views, fill=flat is None)
        elif spec.images:
            self.encoder = Encoder(spec, views.take)
        half = len(spec.layers) // 2
        self.actor = _perceptron(spec.layers[:half], views)
        self.critic = _perceptron(spec.layers[half:], views)
        self.log_std = nn.Parameter(views.take(spec.action_size)) if spec.continuous else None
        for name in ("mean", "inverse_std", "variance"):
            view = views.take(spec.vector_size)
            self.register_buffer(f"observation_{name}", view)
        self.register_buffer("observation_count", views.take(1))
        if own is not None:
            _move_into(own.buffers(), views, fill=flat is None)
        self.actor_layers = _layers(self.actor)
        self.critic_layers = _layers(self.critic)
        if self.engine_here == NUMPY:
            self._host_actor = host_perceptron(self.actor_layers)
            self._host_critic = host_perceptron(self.critic_layers)
        if flat is None:
            self._initialize(seed)

    def over(self, flat: Tensor) -> ActorCritic:
        """The same network over another buffer, on whatever device that is."""
        return ActorCritic(
            self.spec,
            normalize_observations=self.normalize_observations,
            engine=self.engine,
            flat=flat,
        )

    def _initialize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            if self.encoder is not None:
                self.encoder.initialize(generator)
            for layers, head_gain in ((self.actor_layers, 0.01), (self.critic_layers, 1.0)):
                for weight, _ in layers:
                    gain = head_gain if weight is layers[-1][0] else 2.0**0.5
                    nn.init.orthogonal_(weight, gain, generator=generator)
            self.observation_inverse_std.fill_(1.0)
            self.observation_variance.fill_(1.0)

    def normalize(self, observations: Tensor) -> Tensor:
        """Rows as :meth:`policy` and :meth:`value` read them.

        Numbers are standardised and clamped, or pass as they are; rows with images stay bytes until
        the encoder reads them.
        """
        return observations if self.spec.images else self.standardize(observations)

    def policy(self, normalized: Tensor) -> Tensor:
        """Logits ``[B, A]`` of a categorical policy, or means ``[B, A]`` of a Gaussian one."""
        if self._runs_in_numpy:
            return torch.from_numpy(self._host_actor.outputs(normalized.numpy()))
        return self.policy_of_parts(*self._parts(normalized))

    def policy_of_parts(self, vector: Tensor | None, images: Sequence[Tensor]) -> Tensor:
        """The same of observations that are taken apart.

        Args:
            vector: ``[B, V]`` float32, as :meth:`standardize` gives it; ``None`` where there is
                nothing beside images.
            images: each ``[B, C, H, W]`` float32 from 0 to 1.
        """
        if self.own is not None:
            outputs: Tensor = self.own(own_inputs(vector, images, self.spec))[0]
            return outputs
        return forward_layers(self.actor_layers, self._features(vector, images))

    def value(self, normalized: Tensor) -> Tensor:
        """State values ``[B]``."""
        if self.own is not None:
            return self.both(normalized)[1]
        if self._runs_in_numpy:
            return torch.from_numpy(self._host_critic.outputs(normalized.numpy())).squeeze(-1)
        features = self._features(*self._parts(normalized))
        return forward_layers(self.critic_layers, features).squeeze(-1)

    def both(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        """Policy outputs ``[B, A]`` and values ``[B]``; what they share is computed once."""
        vector, images = self._parts(normalized)
        if self.own is not None:
            outputs, values = self.own(own_inputs(vector, images, self.spec))
            return outputs, values
        features = self._features(vector, images)
        values = forward_layers(self.critic_layers, features).squeeze(-1)
        return forward_layers(self.actor_layers, features), values

    @property
    def _runs_in_numpy(self) -> bool:
        return self.engine_here == NUMPY and not torch.is_grad_enabled()

    def _features(self, vector: Tensor | None, images: Sequence[Tensor]) -> Tensor:
        if self.encoder is None:
            assert vector is not None
            return vector
        return self.encoder(vector, images)  # type: ignore[no-any-return]

    def _parts(self, normalized: Tensor) -> tuple[Tensor | None, Sequence[Tensor]]:
        """The numbers, standardised where that is on, and the images of what is normalised."""
        vector, images = rows_apart(normalized, self.spec)
        if self.spec.images and vector is not None:
            vector = self.standardize(vector)
        return vector, images

    def standardize(self, vector: Tensor) -> Tensor:
        """Numbers ``[B, V]`` standardised and clamped, or as they are where that is off."""
        if not self.normalize_observations:
            return vector
        # The mean is taken off first: a large constant feature must come out as exactly 0.
        centred = vector - self.observation_mean
        return centred.mul_(self.observation_inverse_std).clamp_(
            -OBSERVATION_CLAMP, OBSERVATION_CLAMP
        )

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Policy outputs ``[B, A]`` and values ``[B]`` of raw observations ``[B, D]``."""
        return self.both(self.normalize(observations))

    @torch.no_grad()
    def update_statistics(self, observations: Tensor) -> None:
        """Merge raw observations ``[R, D]`` into the statistics.

        Parallel variance (Chan, Golub and LeVeque 1979, eq. 2.1): with counts a and b, means and
        variances of both sides, and delta the difference of the means,
        ``n = a + b``, ``mean += delta b / n``, ``var = (a var_a + b var_b + delta^2 a b / n) / n``.
        """
        if not self.normalize_observations or not self.spec.vector_size:
            return
        if self.spec.images:
            observations = vector_part(observations, self.spec)
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


def host_perceptron(layers: Layers) -> NumpyPerceptron:
    """Layers in host memory as numpy sees them, with the gradients that they have by now."""
    pairs = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in layers]
    slopes = [
        (weight.grad.numpy(), bias.grad.numpy())
        for weight, bias in layers
        if weight.grad is not None and bias.grad is not None
    ]
    return NumpyPerceptron(pairs, slopes)


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _buffer_sizes(spec: NetworkSpec, own: nn.Module | None) -> tuple[int, int]:
    """(learned, all) floats of a network's buffer, each view padded to the alignment."""
    products = [] if own is not None else [(i, o) for _, i, o in spec.trunk]
    trainable = sum(_padded(i * o) + _padded(o) for i, o in (*products, *spec.layers))
    trainable += _padded(spec.action_size) if spec.continuous else 0
    fixed = 3 * _padded(spec.vector_size) + _ALIGNMENT
    if own is not None:
        trainable += sum(_padded(parameter.numel()) for parameter in own.parameters())
        fixed += sum(_padded(buffer.numel()) for buffer in own.buffers())
    return trainable, trainable + fixed


def _move_into(tensors: Iterable[Tensor], views: _Views, *, fill: bool) -> None:
    """Let tensors live in a buffer; ``fill`` copies their values there first."""
    for tensor in tensors:
        view = views.take(*tensor.shape)
        if fill:
            view.copy_(tensor.detach())
        tensor.data = view


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
