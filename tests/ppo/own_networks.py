"""Networks as a user might write them, good and bad. Named in tests by path."""

import torch
from torch import nn


class Shared(nn.Module):
    """One trunk under both heads, with a constant that travels as a buffer."""

    def __init__(self, spec):
        super().__init__()
        inputs = spec.images[0].size if spec.images else spec.observation_size
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), nn.ReLU())
        self.head = nn.Linear(12, spec.action_size)
        self.critic = nn.Linear(12, 1)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, observations):
        features = self.trunk(observations) * self.scale
        return self.head(features), self.critic(features).squeeze(-1)


class ByKey(nn.Module):
    """Reads a dict of images and numbers."""

    def __init__(self, spec):
        super().__init__()
        self.head = nn.Linear(spec.vector_size + spec.images[0].channels, spec.action_size)
        self.critic = nn.Linear(spec.vector_size, 1)

    def forward(self, parts):
        pixels, vector = parts["pixels"], parts["vector"]
        both = torch.cat([vector, pixels.mean((2, 3))], 1)
        return self.head(both), self.critic(vector).squeeze(-1)


class Wrong(Shared):
    def forward(self, observations):
        outputs, values = super().forward(observations)
        return outputs, values.unsqueeze(-1)


def make_double(spec):
    return Shared(spec).double()


def make_text(spec):
    return "a network"


def make_nothing(spec):
    return nn.Identity()


def make_broken(spec):
    raise RuntimeError("no weights today")
