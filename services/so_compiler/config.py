"""Configuration of the SO compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.common.config import require
from services.common.service import RuntimeConfig

MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class GrammarLimits:
    """What one constraint may ask for. Source: reliability-and-security.md, section 3."""

    max_schema_bytes: int = 256 * 1024
    max_tools_bytes: int = MIB
    max_depth: int = 32
    max_nodes: int = 10_000
    max_enum_values: int = 1_000
    max_ref_expansions: int = 10_000
    max_repeats: int = 100_000  # minLength, maxItems, ...: kept in compact form
    max_pattern_bytes: int = 4 * 1024
    max_ebnf_bytes: int = 64 * 1024
    max_choices: int = 1_000
    max_tools: int = 128
    max_states: int = 200_000  # of the automata of all patterns of one constraint
    max_work: int = 4_000_000  # steps to build them; about the CPU budget
    cpu_s: float = 2.0
    wall_s: float = 5.0
    memory_bytes: int = 256 * MIB
    max_artifact_bytes: int = 64 * MIB


@dataclass(frozen=True)
class CacheLimits:
    """What is kept. Source: reliability-and-security.md, section 3; engine.md, section 5.1."""

    max_bytes: int = 256 * MIB
    max_entries: int = 4096
    max_tenant_share: float = 0.25
    negative_ttl_s: float = 60.0
    max_negative_entries: int = 4096


@dataclass(frozen=True)
class SoCompilerConfig:
    """One compiler process and its children."""

    listen: str = "127.0.0.1:7501"
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    cache: CacheLimits = field(default_factory=CacheLimits)
    num_workers: int = 2  # children; each compiles one constraint at a time
    max_queued: int = 64
    max_concurrent_per_tenant: int = 4  # running and queued

    def __post_init__(self) -> None:
        require(1 <= self.num_workers <= 64, "num_workers must be in [1, 64]")
        require(self.max_queued > 0, "max_queued must be above 0")
        require(self.max_concurrent_per_tenant > 0, "max_concurrent_per_tenant must be above 0")
        require(0 < self.cache.max_tenant_share <= 1, "cache.max_tenant_share must be in (0, 1]")
        require(self.grammar.cpu_s > 0 and self.grammar.wall_s > 0, "grammar times must be above 0")
