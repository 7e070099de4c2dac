"""From rows of bytes to features: the trunk that actor and critic share where there are images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from autoplace.device_names import CPU
from autoplace.workload import FLOAT_BYTES, ImageSpec, NetworkSpec

Take = Callable[..., Tensor]  # hands out the next part of a buffer in a shape


def rows_apart(rows: Tensor, spec: NetworkSpec) -> tuple[Tensor | None, Sequence[Tensor]]:
    """The numbers ``[B, V]`` of observation rows, ``None`` where there are none, and the images."""
    if not spec.images:
        return rows, ()
    vector = vector_part(rows, spec) if spec.vector_size else None
    return vector, image_parts(rows, spec)


def vector_part(rows: Tensor, spec: NetworkSpec) -> Tensor:
    """The numbers ``[B, V]`` (float32) that begin rows of bytes ``[B, D]``."""
    return rows[:, : spec.vector_size * FLOAT_BYTES].contiguous().view(torch.float32)


def image_parts(rows: Tensor, spec: NetworkSpec) -> list[Tensor]:
    """Each image of rows of bytes ``[B, D]``, as ``[B, C, H, W]`` float32 from 0 to 1.

    In memory the channels are last on a CPU with oneDNN, whose convolutions are faster so.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    on_cpu = rows.device.type == CPU and has_onednn
    layout = torch.channels_last if on_cpu else torch.preserve_format
    images, start = [], spec.vector_size * FLOAT_BYTES
    for image in spec.images:
        pixels = rows[:, start : start + image.size]
        start += image.size
        if image.channels_first:
            pixels = pixels.view(-1, image.channels, image.height, image.width)
        else:
            pixels = pixels.view(-1, image.height, image.width, image.channels)
            pixels = pixels.permute(0, 3, 1, 2)
        images.append(pixels.to(torch.float32, memory_format=layout).mul_(1.0 / image.high))
    return images


class Encoder(nn.Module):
    """Convolutions and a linear layer for each image, ReLU behind each (Mnih et al. 2015).

    What it puts out is side by side, behind the numbers that are no part of an image.
    """

    def __init__(self, spec: NetworkSpec, take: Take) -> None:
        """Build over what ``take`` hands out."""
        super().__init__()
        self.images = nn.ModuleList(_image_encoder(image, take) for image in spec.images)

    def forward(self, vector: Tensor | None, images: Sequence[Tensor]) -> Tensor:
        """Features ``[B, F]`` of images and of the (standardised) numbers beside them."""
        parts = [] if vector is None else [vector]
        parts += [encode(image) for encode, image in zip(self.images, images, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def initialize(self, generator: torch.Generator) -> None:
        """Orthogonal weights of gain sqrt(2)."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter, 2.0**0.5, generator=generator)


def _image_encoder(image: ImageSpec, take: Take) -> nn.Sequential:
    modules: list[nn.Module] = []
    for layer in image.convolutions:
        convolution = nn.Conv2d(
            layer.in_channels, layer.out_channels, layer.kernel, layer.stride, device="meta"
        )
        _place(convolution, take)
        modules += [convolution, nn.ReLU(inplace=True)]
    linear = nn.Linear(*image.linear, device="meta")
    _place(linear, take)
    return nn.Sequential(*modules, nn.Flatten(), linear, nn.ReLU(inplace=True))


def _place(module: nn.Conv2d | nn.Linear, take: Take) -> None:
    assert module.bias is not None
    module.weight = nn.Parameter(take(*module.weight.shape))
    module.bias = nn.Parameter(take(*module.bias.shape))
