"""Decides which encoder machine and which card on it get an image.

The caller draws a machine at random; on it the card with the fewest patches in progress takes the
image. Source: kvcache-and-balancing.md, section 14.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from services.common.errors import Reason
from services.lb.outlier import OutlierConfig, OutlierTable


def num_patches(width: int, height: int, patch_size: int) -> int:
    """Returns the patches of an image of this size, which is the one after preprocessing."""
    return math.ceil(width / patch_size) * math.ceil(height / patch_size)


def pick_card(patches_in_progress: Sequence[int]) -> int:
    """Returns the card with the fewest patches in progress; ties: the lowest. Case T-VIS-1."""
    return min(range(len(patches_in_progress)), key=lambda card: (patches_in_progress[card], card))


class MachineDraw:
    """Draws machines uniformly; one that did not answer is skipped for a while."""

    def __init__(self, skip_s: float = 5.0) -> None:
        self._skip_s = skip_s
        self._skipped_until_s: dict[str, float] = {}

    def draw(
        self,
        machine_ids: Sequence[str],
        tried: AbstractSet[str],
        now_s: float,
        rng: random.Random,
    ) -> str | None:
        """Returns a live machine that was not tried for this image; None when there is none."""
        self._skipped_until_s = {k: v for k, v in self._skipped_until_s.items() if v > now_s}
        left = [m for m in sorted(machine_ids) if m not in tried]
        # All of them skipped: better an answer that may be late than none.
        open_ones = [m for m in left if m not in self._skipped_until_s] or left
        return rng.choice(open_ones) if open_ones else None

    def failed(self, machine_id: str, now_s: float) -> None:
        """Notes that a machine did not answer."""
        self._skipped_until_s[machine_id] = now_s + self._skip_s


@dataclass(frozen=True)
class BalancerConfig:
    """The rules of one machine's balancer."""

    ticket_s: float = 60.0  # a charge that nobody gives back lapses
    report_timeout_s: float = 3.0
    outlier: OutlierConfig = field(default_factory=OutlierConfig)


@dataclass(frozen=True)
class CardReport:
    """What a card says of itself. `num_patches` are in progress by its own count."""

    instance_id: str
    address: str
    num_patches: int
    max_patches: int
    accepting: bool


@dataclass(frozen=True)
class PickedCard:
    """The card an image goes to; `ticket` names the charge."""

    instance_id: str
    address: str
    ticket: str


@dataclass(frozen=True)
class Refused:
    """No card takes the image."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class _Ticket:
    instance_id: str
    num_patches: int


@dataclass
class _Card:
    report: CardReport
    heard_s: float
    charged: int = 0  # patches of the tickets that are out
    foreign: int = 0  # patches it reported beyond our tickets (from before our restart)

    @property
    def load(self) -> int:
        return self.charged + self.foreign


class VisionBalancer:
    """Pending patches per card of one machine. The caller passes the time and a boot id.

    Tickets carry the boot id, so that one from a former life gives nothing back.
    """

    def __init__(self, config: BalancerConfig, boot_id: str) -> None:
        self._config = config
        self._boot_id = boot_id
        self._cards: dict[str, _Card] = {}
        self._tickets: dict[str, _Ticket] = {}
        self._lapses: deque[tuple[float, str]] = deque()
        self._numbers = itertools.count(1)
        self._outliers = OutlierTable(config.outlier)

    @property
    def num_cards(self) -> int:
        """Returns the cards that are known."""
        return len(self._cards)

    def loads(self) -> dict[str, int]:
        """Returns the patches in progress per card."""
        return {card_id: card.load for card_id, card in sorted(self._cards.items())}

    def census(self) -> dict[str, int]:
        """Returns how many of everything is held."""
        return {"cards": len(self._cards), "tickets": len(self._tickets)}

    def report(self, report: CardReport, now_s: float) -> None:
        """Takes a card's report; the first one makes it a member."""
        # Reports come whether or not images do: a lapsed charge must not wait for the next image.
        self._lapse(now_s)
        card = self._cards.get(report.instance_id)
        if card is None:
            card = self._cards[report.instance_id] = _Card(report, now_s)
            self._outliers.add(report.instance_id)
        card.report, card.heard_s = report, now_s
        card.foreign = max(0, report.num_patches - card.charged)

    def lost(self, instance_id: str) -> None:
        """Takes a card out; its tickets are void."""
        self._cards.pop(instance_id, None)
        self._tickets = {k: t for k, t in self._tickets.items() if t.instance_id != instance_id}
        self._outliers.keep_only(self._cards)

    def pick(self, patches: int, exclude: AbstractSet[str], now_s: float) -> PickedCard | Refused:
        """Charges the least loaded card, or says why none takes the image."""
        self._lapse(now_s)
        alive = [
            card_id
            for card_id, card in sorted(self._cards.items())
            if card.report.accepting
            and card_id not in exclude
            and now_s - card.heard_s <= self._config.report_timeout_s
            and self._outliers.allows(card_id, now_s)
        ]
        if not alive:
            return Refused(Reason.NO_INSTANCE, "no encoder card is up")
        # An image larger than the bound still goes to a card that is empty.
        room = [
            card_id
            for card_id in alive
            if not self._cards[card_id].load
            or not self._cards[card_id].report.max_patches
            or self._cards[card_id].load + patches <= self._cards[card_id].report.max_patches
        ]
        if not room:
            return Refused(Reason.ENGINE_FULL, "every encoder card is full", 0.2)
        card_id = room[pick_card([self._cards[c].load for c in room])]
        card = self._cards[card_id]
        card.charged += patches
        ticket = f"{self._boot_id}-{next(self._numbers)}"
        self._tickets[ticket] = _Ticket(card_id, patches)
        self._lapses.append((now_s + self._config.ticket_s, ticket))
        self._outliers.on_pick(card_id)
        return PickedCard(card_id, card.report.address, ticket)

    def release(self, ticket: str, card_fault: bool, now_s: float) -> bool:
        """Gives a charge back; returns whether it was held."""
        held = self._tickets.pop(ticket, None)
        if held is None:
            return False
        card = self._cards.get(held.instance_id)
        if card is not None:
            card.charged -= held.num_patches
            if card_fault:
                self._outliers.on_failure(held.instance_id, now_s)
            else:
                self._outliers.on_success(held.instance_id)
        self._lapse(now_s)
        return True

    def _lapse(self, now_s: float) -> None:
        while self._lapses and self._lapses[0][0] <= now_s:
            _, ticket = self._lapses.popleft()
            held = self._tickets.pop(ticket, None)
            if held is not None and held.instance_id in self._cards:
                self._cards[held.instance_id].charged -= held.num_patches
                self._outliers.on_release(held.instance_id)
        if len(self._lapses) > 2 * len(self._tickets) + 64:
            self._lapses = deque(x for x in self._lapses if x[1] in self._tickets)
