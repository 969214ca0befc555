"""Networks of transformers in their own sizes, with random weights, for `sashiko bench`: Deformable DETR, which samples its image where
it decides to look, on 320 x 320 pixels; and Encodec, a codec of one second of sound.

    sashiko bench --models benchmarks/architectures.py:detector,benchmarks/architectures.py:codec --precision fp32,bf16
"""

from __future__ import annotations

import torch
from torch import nn


class Detector(nn.Module):
    """Pixels to the states of the boxes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DeformableDetrConfig, DeformableDetrModel, ResNetConfig

        backbone = ResNetConfig(out_features=["stage2", "stage3", "stage4"])
        own = {"use_pretrained_backbone": False, "use_timm_backbone": False, "backbone": None}
        self.model = DeformableDetrModel(DeformableDetrConfig(backbone_config=backbone, **own))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(pixel_values=pixels).last_hidden_state
        return result


class Codec(nn.Module):
    """Sound to sound, by way of codes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import EncodecConfig, EncodecModel

        self.model = EncodecModel(EncodecConfig())

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(input_values=sound).audio_values
        return result


def detector() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Detector().eval(), (torch.randn(1, 3, 320, 320),)


def codec() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Codec().eval(), (torch.randn(1, 1, 24_000),)
