"""Configuration of an encoder engine: one process is one card."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig
from services.encoder.patches import PatchConfig
from services.engine.model.settings import TorchConfig


@dataclass(frozen=True)
class EncoderModelConfig:
    """What computes, and how large its output is."""

    engine: str = "sim"
    model_id: str = "deepseek-v4.1-flash"
    hidden: int = 64  # columns of an embedding; the simulation keeps them small
    ns_per_patch: float = 2_000.0  # predicted time of the forward
    time_scale: float = 1.0  # 0 answers as fast as the machine can
    patches: PatchConfig = field(default_factory=PatchConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)

    def __post_init__(self) -> None:
        require(self.engine in ("sim", "torch"), f"engine is sim or torch, not {self.engine!r}")
        require(self.hidden >= 1, "hidden must be at least 1")
        require(self.ns_per_patch >= 0, "ns_per_patch must not be negative")
        require(self.time_scale >= 0, "time_scale must not be negative")
        if self.engine == "torch":
            vision = self.torch.model.vision
            require(vision is not None, "this model has no vision tower")
            assert vision is not None
            object.__setattr__(self, "hidden", self.torch.model.text.hidden_size)
            planned = PatchConfig(
                vision.patch_size,
                vision.downsample_ratio,
                vision.max_image_tokens,
                vision.min_pixels,
                vision.max_wh_ratio,
            )
            object.__setattr__(self, "patches", planned)

    @property
    def weights_id(self) -> str:
        return "sim" if self.engine == "sim" else self.torch.weights_id


@dataclass(frozen=True)
class EncoderConfig:
    """One card; the defaults run on a laptop."""

    listen: str = "127.0.0.1:0"
    max_batch_patches: int = 16384  # patches of one forward
    max_queued_patches: int = 262144  # beyond it new images are refused
    max_image_bytes: int = 20 * 1024 * 1024
    max_image_pixels: int = 100_000_000
    image_timeout_s: float = 20.0
    cache_bytes: int = 256 * 1024 * 1024
    cache_ttl_s: float = 600.0
    report_interval_s: float = 0.1
    stall_limit_s: float = 60.0
    model: EncoderModelConfig = field(default_factory=EncoderModelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.max_batch_patches >= 1, "max_batch_patches must be at least 1")
        require(self.max_queued_patches >= 1, "max_queued_patches must be at least 1")
