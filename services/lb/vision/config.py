"""Configuration of the vision balancer."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig
from services.lb.vision.policy import BalancerConfig

ROLE = "vision-lb"  # one member per encoder machine


@dataclass(frozen=True)
class VisionLbConfig:
    """The balancer of one encoder machine's cards."""

    listen: str = "127.0.0.1:7303"
    rules: BalancerConfig = field(default_factory=BalancerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.rules.ticket_s > 0, "rules.ticket_s must be above 0")
        require(self.rules.report_timeout_s > 0, "rules.report_timeout_s must be above 0")
