"""One request's output over all its attempts: a state machine of indices and epochs. Pure.

Engines number output tokens over all attempts. Whatever happens behind — hand-off, migration, a
lost engine and a second run — the client sees index 0, 1, 2, ... once each: repeats are cut off,
a gap is a fault of the emitter (P-03). Events of an emitter that no longer owns the request carry
an older epoch and are dropped.
Source: engine.md, section 7.4; architecture.md, section 2.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pelagos.engine.v1 import records_pb2 as records

from services.common.errors import Failure, Reason

# Hand-offs and migrations raise the epoch by one each, so attempts start far enough apart that a
# late emitter of an old attempt is always older.
EPOCHS_PER_ATTEMPT = 64
_EPOCHS_PER_S = 4
_EPOCHS_SINCE_UNIX_S = 1_700_000_000  # 4 a second from then on fit 32 bits until 2057
_TOKEN_BYTES = 4


def first_epoch(wall_s: float) -> int:
    """Returns the epoch of a request's first attempt.

    It rises with time: a client that uses a request id again, perhaps at another entrypoint, is
    newer to engines that still remember the first use, not a repeat of it.
    """
    return max(1, int((wall_s - _EPOCHS_SINCE_UNIX_S) * _EPOCHS_PER_S) & 0x7FFF_FFFF)


class Place(enum.Enum):
    """Where the request is."""

    QUEUED = "queued"  # being placed
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True)
class Delivered:
    """New tokens for the client, already free of repeats."""

    token_ids: bytes
    logprobs: bytes
    top: list[records.TopLogprobs]


@dataclass(frozen=True)
class Follow:
    """Attach to another engine."""

    instance_id: str
    address: str
    from_index: int


@dataclass(frozen=True)
class Ended:
    """The engine has finished the request."""

    reason: records.FinishReason.ValueType


@dataclass(frozen=True)
class Broken:
    """This attempt is over; whether another follows is `retry.decide`'s business."""

    failure: Failure


Action = Delivered | Follow | Ended | Broken


@dataclass
class TokenStream:
    """State of one request's output.

    Args:
        output_tokens: what was delivered, little-endian u32; kept for a run again.
    """

    attempt: int = 1
    epoch: int = 1
    place: Place = Place.QUEUED
    output_tokens: bytearray = field(default_factory=bytearray)
    usage: records.Usage = field(default_factory=records.Usage)
    instances: list[str] = field(default_factory=list)
    progress: bool = False  # whether this attempt delivered anything

    @property
    def next_index(self) -> int:
        """Returns the index of the next token the client needs."""
        return len(self.output_tokens) // _TOKEN_BYTES

    def placed(self, instance_id: str) -> None:
        """Notes that a prefill engine has taken the request."""
        self.place = Place.PREFILL
        self.instances.append(instance_id)

    def next_attempt(self) -> None:
        """Starts another run; older emitters fall silent."""
        self.attempt += 1
        self.epoch += EPOCHS_PER_ATTEMPT
        self.place = Place.QUEUED
        self.progress = False

    def on_event(self, event: records.RequestEvent) -> list[Action]:
        """Returns what an engine's event asks for, in order; nothing for an outdated one."""
        if self.place is Place.ENDED or (event.epoch and event.epoch < self.epoch):
            return []
        self.epoch = max(self.epoch, event.epoch)
        if event.HasField("usage"):
            self.usage = event.usage
        kind = event.WhichOneof("event")
        if kind == "tokens":
            return self._on_tokens(event.tokens)
        if kind == "moved":
            return self._on_moved(event.moved)
        if kind == "finished":
            return self._on_finished(event.finished)
        if kind == "failed":
            # The proto's reason becomes a Failure in the shell, which owns that mapping.
            raise AssertionError("failed events go through on_failure")
        return []

    def on_failure(self, failure: Failure, epoch: int = 0) -> list[Action]:
        """Returns what the end of an attempt asks for."""
        if self.place is Place.ENDED or (epoch and epoch < self.epoch):
            return []
        return [Broken(failure)]

    def end(self) -> None:
        """Marks the request as over; everything later is dropped."""
        self.place = Place.ENDED

    def _on_tokens(self, tokens: records.Tokens) -> list[Action]:
        num_tokens = len(tokens.token_ids) // _TOKEN_BYTES
        skip = self.next_index - tokens.first_index
        if skip < 0:
            return [
                Broken(
                    Failure(
                        Reason.BACKEND_LOST,
                        "the engine left out output tokens",
                        {"next_index": str(self.next_index), "got": str(tokens.first_index)},
                    )
                )
            ]
        if skip >= num_tokens:
            return []
        cut = skip * _TOKEN_BYTES
        delivered = Delivered(
            tokens.token_ids[cut:],
            tokens.logprobs[cut:],
            list(tokens.top[skip:]) if tokens.top else [],
        )
        self.output_tokens += delivered.token_ids
        self.progress = True
        return [delivered]

    def _on_moved(self, moved: records.Moved) -> list[Action]:
        self.epoch = max(self.epoch, moved.epoch)
        self.place = Place.DECODE
        self.instances.append(moved.instance_id)
        return [Follow(moved.instance_id, moved.address, self.next_index)]

    def _on_finished(self, finished: records.Finished) -> list[Action]:
        if finished.HasField("usage"):
            self.usage = finished.usage
        failure = _FAILURES.get(finished.reason)
        if failure is not None:
            return [Broken(Failure(*failure))]
        self.place = Place.ENDED
        return [Ended(finished.reason)]


# Ends that are no answer. ABORT without our asking means the engine gave the request up.
_FAILURES: dict[int, tuple[Reason, str]] = {
    records.FINISH_REASON_UNSPECIFIED: (Reason.BACKEND_LOST, "the engine ended without a reason"),
    records.FINISH_REASON_ABORT: (Reason.BACKEND_LOST, "the engine aborted the request"),
    records.FINISH_REASON_INSUFFICIENT_SYSTEM_RESOURCE: (
        Reason.ENGINE_FULL,
        "the engine ran out of memory",
    ),
    records.FINISH_REASON_PREEMPTED_RESUMABLE: (Reason.BACKEND_LOST, "the engine stopped early"),
    records.FINISH_REASON_GRAMMAR_ERROR: (
        Reason.UNSUPPORTED_FEATURE,
        "the output could not be held to its format",
    ),
    records.FINISH_REASON_VISION_ERROR: (Reason.IMAGE_INVALID, "an image could not be encoded"),
}
