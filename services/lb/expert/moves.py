"""Plans how expert weights move from one slot table to the next, without negotiation.

Every rank computes the same plan alone. All reads see the old contents, so the executor stages or
double-buffers. Source: engine.md, section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Where a slot's new contents come from."""

    KEEP = "keep"
    LOCAL = "local"  # another slot of the same rank
    REMOTE = "remote"  # a slot of another rank


@dataclass(frozen=True)
class Move:
    """New contents of one slot. Slots are (rank, slot on that rank).

    `from_staged`: the source slot is itself filled by this plan; copy once it has arrived.
    """

    rank: int
    slot: int
    expert: int
    kind: Kind
    source_rank: int
    source_slot: int
    from_staged: bool = False


def sender_index(receiver: int, num_receivers: int, num_senders: int) -> int:
    """Returns which sender serves this receiver: blocks of equal size, the rest one each.

    Both ends compute it alone. S,R = 2,5 gives 0 0 1 1 0; 3,7 gives 0 0 1 1 2 2 0; 3,2 gives 0 1.
    """
    per_sender = num_receivers // num_senders
    if receiver < per_sender * num_senders:
        return receiver // per_sender
    return receiver - per_sender * num_senders


def shuffle_plan(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[Move]:
    """Returns one move per slot, by rank and slot. `old` and `new` list the experts per rank.

    Raises: ValueError when an expert that is needed sits nowhere.
    """
    senders: dict[int, list[int]] = {}
    for rank, experts in enumerate(old):
        for expert in dict.fromkeys(experts):
            senders.setdefault(expert, []).append(rank)
    receivers: dict[int, list[int]] = {}
    for rank, experts in enumerate(new):
        for expert in dict.fromkeys(experts):
            if expert not in old[rank]:
                receivers.setdefault(expert, []).append(rank)
    moves: list[Move] = []
    for rank, experts in enumerate(new):
        arrived: dict[int, int] = {}  # expert -> slot of this rank that receives it
        for slot, expert in enumerate(experts):
            if old[rank][slot] == expert:
                moves.append(Move(rank, slot, expert, Kind.KEEP, rank, slot))
            elif expert in old[rank]:
                source = list(old[rank]).index(expert)
                moves.append(Move(rank, slot, expert, Kind.LOCAL, rank, source))
            elif expert in arrived:
                source = arrived[expert]
                moves.append(Move(rank, slot, expert, Kind.LOCAL, rank, source, True))
            else:
                if expert not in senders:
                    raise ValueError(f"expert {expert} sits in no slot")
                owners, wanting = senders[expert], receivers[expert]
                index = sender_index(wanting.index(rank), len(wanting), len(owners))
                source_rank = owners[index]
                source = list(old[source_rank]).index(expert)
                arrived[expert] = slot
                moves.append(Move(rank, slot, expert, Kind.REMOTE, source_rank, source))
    return moves
