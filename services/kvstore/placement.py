"""Which nodes hold which shard of a block, and how large a shard is.

Source: kvcache-and-balancing.md, sections 3.2 and 4; cases T-PLACE and T-EC-SIZE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
SHARD_HEADER_BYTES: Final = 128
OBJECT_HEADER_BYTES: Final = 256
_SHARD_ALIGN: Final = 64


@dataclass(frozen=True)
class Profile:
    """Data and parity shards of a placement group; k = 1, m = 0 is one whole copy."""

    k: int
    m: int

    def __post_init__(self) -> None:
        if not (self.k >= 1 and self.m >= 0 and self.k + self.m <= 16):
            raise ValueError("profile: k at least 1, at most 16 shards in all")

    @property
    def num_shards(self) -> int:
        """Returns k + m."""
        return self.k + self.m

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Returns the profile of "10+2". Raises ValueError."""
        k, _, m = text.partition("+")
        if not (k.isdecimal() and m.isdecimal()):
            raise ValueError(f"profile: {text!r} is not like 10+2")
        return cls(int(k), int(m))

    def __str__(self) -> str:
        return f"{self.k}+{self.m}"


WHOLE: Final = Profile(1, 0)
DEFAULT_PROFILE: Final = Profile(10, 2)


def placement_group(key: bytes, num_groups: int) -> int:
    """Returns the placement group of a key."""
    return int.from_bytes(key[:2], "big") % num_groups


def rotation(key: bytes, profile: Profile) -> int:
    """Returns by how many members the shards of a key are turned, so that parity spreads."""
    return key[2] % profile.num_shards


def member_of_shard(key: bytes, shard: int, profile: Profile) -> int:
    """Returns the position in the group's member list that holds a shard."""
    return (shard + rotation(key, profile)) % profile.num_shards


def shard_of_member(key: bytes, member: int, profile: Profile) -> int:
    """Returns which shard a member of the group holds."""
    return (member - rotation(key, profile)) % profile.num_shards


def shard_bytes(object_bytes: int, profile: Profile) -> int:
    """Returns the length of each shard's data: an even share, rounded up to 64 bytes.

    A whole copy is not padded: it is the object itself.
    """
    if profile.k == 1:
        return object_bytes
    share = -(-object_bytes // profile.k)
    return -(-share // _SHARD_ALIGN) * _SHARD_ALIGN


def slot_bytes(payload_bytes: int, profile: Profile) -> int:
    """Returns the size of a slot that takes one shard of a block: header, data, whole pages."""
    shard = shard_bytes(OBJECT_HEADER_BYTES + payload_bytes, profile) + SHARD_HEADER_BYTES
    return -(-shard // PAGE_BYTES) * PAGE_BYTES
