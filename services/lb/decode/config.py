"""Configuration of the decode balancer."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig
from services.lb.decode.balancer import BalancerConfig

LEADER = "decode-lb"  # the name under which the balancer of a cluster is elected


@dataclass(frozen=True)
class DecodeLbConfig:
    """The balancer of all decode ranks of a cluster."""

    listen: str = "127.0.0.1:7302"
    tick_s: float = 0.005  # what waits is decided together, this often
    default_wait_s: float = 1.0  # for callers that name none
    rules: BalancerConfig = field(default_factory=BalancerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.tick_s > 0, "tick_s must be above 0")
        require(self.default_wait_s > 0, "default_wait_s must be above 0")
        require(self.rules.level_factor >= 1, "rules.level_factor must be at least 1")
        require(self.rules.max_waiting_requests > 0, "rules.max_waiting_requests must be above 0")
