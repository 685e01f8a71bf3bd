"""Configuration of the prefill balancer."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.cost_model import CostModel
from services.common.service import RuntimeConfig
from services.lb.prefill.state import BalancerConfig


@dataclass(frozen=True)
class PrefillLbConfig:
    """One shard's balancer."""

    listen: str = "127.0.0.1:7301"
    shard: str = ""  # names the part of the engine pool; each shard has its own leader
    tick_s: float = 0.05  # how often deadlines and rounds are looked at
    max_commands: int = 4_096  # unsent commands of one engine; more, and its call ends
    rules: BalancerConfig = field(default_factory=BalancerConfig)
    # Until lb/cost/<engine type> in the store says better.
    cost: CostModel = field(default_factory=CostModel)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        rules = self.rules
        require(self.tick_s > 0, "tick_s must be above 0")
        require(rules.min_follow_tokens > 0, "rules.min_follow_tokens must be above 0")
        require(self.max_commands > 0, "max_commands must be above 0")
        require(
            list(rules.bucket_bounds) == sorted(set(rules.bucket_bounds)),
            "rules.bucket_bounds must rise",
        )
        require(rules.round_s > 0, "rules.round_s must be above 0")
        require(0 < rules.max_tenant_share <= 1, "rules.max_tenant_share must be in (0, 1]")
        require(rules.max_waiting_requests > 0, "rules.max_waiting_requests must be above 0")


def leader_name(shard: str = "") -> str:
    """Returns the name under which the balancer of a shard is elected."""
    return f"prefill-lb.{shard}" if shard else "prefill-lb"
