"""What waits for a client: bytes to send, and tokens held back while too many bytes wait.

A slow reader costs at most `max_bytes` of events; beyond that tokens stay tokens (four bytes
each), are not acknowledged, and the engine stops at its credit (P-12). Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.entrypoint.token_stream import Delivered


@dataclass
class OutputBuffer:
    """Bytes and held tokens of one response. `is_full` says to hold tokens back."""

    max_bytes: int

    def __post_init__(self) -> None:
        self._pieces: list[bytes] = []
        self.num_bytes = 0
        self._held: deque[Delivered] = deque()
        self.num_held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Returns whether no more events should be made for now."""
        return self.num_bytes >= self.max_bytes

    def add(self, data: bytes) -> None:
        """Adds events to send."""
        self._pieces.append(data)
        self.num_bytes += len(data)

    def take(self) -> bytes:
        """Returns everything that waits, joined: events that are ready together go together."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.num_bytes = 0
        return data

    def hold(self, delivered: Delivered) -> None:
        """Keeps tokens until the buffer has room."""
        self._held.append(delivered)
        self.num_held_bytes += len(delivered.token_ids)

    @property
    def has_held(self) -> bool:
        """Returns whether tokens wait."""
        return bool(self._held)

    def release(self, max_steps: int) -> list[Delivered]:
        """Returns the oldest held tokens, in order."""
        released = [self._held.popleft() for _ in range(min(max_steps, len(self._held)))]
        self.num_held_bytes -= sum(len(delivered.token_ids) for delivered in released)
        return released
