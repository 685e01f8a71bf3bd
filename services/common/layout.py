"""Keys in the store. Source: kvcache-and-balancing.md, section 17."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_VALUE_BYTES: Final = 8192


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster, all under `/pelagos/v1/<cluster>/`."""

    cluster: str = "local"

    @property
    def root(self) -> str:
        """Returns the prefix of everything."""
        return f"/pelagos/v1/{self.cluster}/"

    @property
    def identity(self) -> str:
        """Returns the key that names one life of the store (`store.store_identity`)."""
        return f"{self.root}store-id"

    @property
    def members(self) -> str:
        """Returns the prefix of all members."""
        return f"{self.root}members/"

    def member(self, role: str, instance_id: str) -> str:
        """Returns the key of one instance."""
        return f"{self.members}{role}/{instance_id}"

    @property
    def leaders(self) -> str:
        """Returns the prefix of all leaders."""
        return f"{self.root}leaders/"

    def leader(self, service: str) -> str:
        """Returns the key whose create revision is the leader's term."""
        return f"{self.leaders}{service}"

    def config(self, service: str) -> str:
        """Returns the key of a service's tunables."""
        return f"{self.root}config/{service}"

    def named(self, *parts: str) -> str:
        """Returns any other key: `named("as", pool, "desired")`."""
        return self.root + "/".join(parts)
