"""Settings of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.cost_model import CostModel
from services.engine.layout import Geometry, KvLayout, Region, Section

NUM_SOURCE_LAYERS = 4
ENTRY_BYTES = 8  # bytes a token leaves in one source layer, and one position in a ring


@dataclass(frozen=True)
class SpecialIds:
    """Ids the simulation must know; the defaults are those of the V4.1 vocabulary."""

    end: int = 1
    user: int = 128803
    assistant: int = 128804
    think_start: int = 128821
    think_end: int = 128822
    image: int = 129264
    num_plain: int = 128000  # ids below are ordinary text, the rest are special
    # Said first when a grammar forbids the word: the end, ", }, ], the comma, </.
    closers: tuple[int, ...] = (1, 4, 95, 63, 14, 1718)


@dataclass(frozen=True)
class SimConfig:
    """How the simulated model answers and how long it takes."""

    mode: str = "echo"  # hash, echo or scripted
    scripts: str = ""  # folder of scripts, for mode scripted
    vocab_size: int = 129280
    accept_rate: float = 0.7  # mean chance that a draft is accepted
    think_tokens: int = 8  # length of the thought before the answer
    stop_every: int = 256  # hash mode: one token in so many ends the answer; 0 never
    time_scale: float = 1.0  # 0 answers as fast as the machine can
    check: str = "full"  # full: every reused byte; light: windows and tails; off
    ids: SpecialIds = field(default_factory=SpecialIds)

    def __post_init__(self) -> None:
        if self.mode not in ("hash", "echo", "scripted"):
            raise ValueError(f"mode is hash, echo or scripted, not {self.mode!r}")
        if self.check not in ("full", "light", "off"):
            raise ValueError(f"check is full, light or off, not {self.check!r}")
        if not 0 <= self.accept_rate <= 1:
            raise ValueError("accept_rate is in [0, 1]")
        if self.time_scale < 0:
            raise ValueError("time_scale is not negative")


# Times of a mid-size accelerator, so that a demo at time_scale 1 feels like a service.
COST = CostModel(k0_ns=200_000, k1_ns=20_000, k2_ns=0.02, k3_ns=0.01, step0_ns=2_000_000)
CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CURVE_MS = (8.0, 8.1, 8.2, 8.4, 8.8, 9.6, 11.0, 14.0, 20.0, 32.0)


def sim_layout(model_id: str, geometry: Geometry) -> KvLayout:
    """Layout of the pattern bytes: four source layers, two rings and a residue."""
    length = geometry.block_tokens * ENTRY_BYTES
    sections = tuple(
        Section(layer, layer * length, length, "pattern", 1) for layer in range(NUM_SOURCE_LAYERS)
    )
    regions = (
        Region("encoder", geometry.ring, ENTRY_BYTES, storable=True),
        Region("decoder", geometry.ring, ENTRY_BYTES, storable=False),
        Region("residue", 2, ENTRY_BYTES, storable=False),
    )
    return KvLayout(
        geometry, NUM_SOURCE_LAYERS * length, sections, regions, model_id, weights_id="sim"
    )
