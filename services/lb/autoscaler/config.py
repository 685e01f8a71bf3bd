"""Configuration of the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import require
from services.common.service import RuntimeConfig
from services.lb.autoscaler.lifecycle import LifecycleConfig
from services.lb.autoscaler.policy import PoolConfig

LEADER = "autoscaler"  # the name under which the one active instance is elected

# The membership role behind each pool.
ROLE_OF_POOL = {"prefill": "prefill", "decode": "decode", "vision": "encoder"}


@dataclass(frozen=True)
class AutoscalerConfig:
    """The autoscaler of a cluster. Capacities are demand per instance, in each pool's unit."""

    listen: str = "127.0.0.1:7305"
    look_s: float = 5.0  # how often each pool is looked at
    enact: bool = False  # False: counts are published and nobody is started or stopped by us
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    # Missed prompt tokens per second.
    prefill: PoolConfig = field(default_factory=lambda: PoolConfig(capacity=20_000.0))
    # Requests in computation.
    decode: PoolConfig = field(default_factory=lambda: PoolConfig(capacity=100.0))
    # Patches in progress.
    vision: PoolConfig = field(default_factory=lambda: PoolConfig(capacity=50_000.0, spare=1))
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        require(self.look_s > 0, "look_s must be above 0")
        for name, pool in self.pools.items():
            require(pool.capacity > 0, f"{name}.capacity must be above 0")
            require(0 < pool.target_utilization <= 1, f"{name}.target_utilization is in (0, 1]")
            require(pool.spare >= 0, f"{name}.spare must not be negative")
            require(
                1 <= pool.min_instances <= pool.max_instances,
                f"{name}: 1 <= min_instances <= max_instances",
            )
            require(pool.up_step > 0 and pool.down_step > 0, f"{name}: steps must be above 0")

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """Returns the pools by name."""
        return {"prefill": self.prefill, "decode": self.decode, "vision": self.vision}
