"""What the segmented backend needs of a shared storage: named byte strings, written once.

A name is `<writer>/<kind>-<number>`; only its writer ever writes it, anybody may read or delete it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.kvstore.checksums import Buffer


class Medium(Protocol):
    """A shared storage. Every method raises StorageAway when it cannot be reached, the reading
    ones OSError for bytes that cannot be read, the writing ones StorageFull."""

    appends: bool  # whether what is there may grow at its end

    async def names(self) -> set[str]:
        """Returns all names."""
        ...

    async def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns a range, less when the end comes first. Raises FileNotFoundError."""
        ...

    async def tail(self, name: str, num_bytes: int) -> tuple[bytes, int]:
        """Returns the last bytes and the whole length. Raises FileNotFoundError."""
        ...

    async def create(self, name: str, pieces: Sequence[Buffer]) -> None:
        """Writes a new name, durable and whole or not at all. Raises FileExistsError."""
        ...

    async def append(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        """Writes at the end of a name that was created here, durable on return; only where
        `appends`. Raises FileNotFoundError when somebody has deleted or taken it."""
        ...

    async def take(self, name: str, new: str) -> None:
        """Gives a name that somebody else may still be writing a new one, of ours: an append of his
        that was not acknowledged before fails; only where `appends`. Raises FileNotFoundError."""
        ...

    async def delete(self, name: str) -> None:
        """Removes a name; one that is not there is no error."""
        ...

    async def close(self) -> None:
        """Lets go."""
        ...
