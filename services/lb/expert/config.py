"""Configuration of the expert balancer."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig

LEADER = "eplb"  # the name under which the balancer of a cluster is elected


@dataclass(frozen=True)
class EplbConfig:
    """The expert balancer."""

    listen: str = "127.0.0.1:7304"
    max_pools: int = 256
    max_plans: int = 4  # planned at a time; more wait, and past `max_waiting` are refused
    max_waiting: int = 64
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.max_pools > 0, "max_pools must be above 0")
        require(self.max_plans > 0, "max_plans must be above 0")
        require(self.max_waiting >= 0, "max_waiting must not be negative")
