"""Between the messages of the expert balancer and its values. Checks what callers send."""

from __future__ import annotations

import numpy as np
from pelagos.lb.v1 import expert_lb_pb2 as pb

from services.common.errors import Failure, Reason
from services.lb.expert.planning import MIN_GAIN, PlanInput
from services.lb.expert.policy import Policy

# Far above any machine, and far below what would keep a planner busy for hours.
MAX_SLOTS = 16_384
MAX_RANKS = 4_096


def input_of(request: pb.PlanPlacementRequest) -> PlanInput:
    """Returns what is to be planned. Raises Failure(INVALID_REQUEST)."""
    if not request.pool:
        raise Failure(Reason.INVALID_REQUEST, "a plan needs a pool")
    if request.policy not in ("", *Policy):
        raise Failure(Reason.INVALID_REQUEST, f"policy {request.policy[:40]!r} is not known")
    shape = (request.num_steps, request.num_layers, request.num_experts)
    if len(request.loads) != 4 * shape[0] * shape[1] * shape[2]:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"{len(request.loads)} bytes of loads are not {shape} counts",
            {"num_bytes": str(len(request.loads))},
        )
    if request.num_slots > MAX_SLOTS or request.num_ranks > MAX_RANKS:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"{request.num_slots} slots on {request.num_ranks} ranks are more than {MAX_SLOTS} "
            f"on {MAX_RANKS}",
            {"num_slots": str(request.num_slots), "num_ranks": str(request.num_ranks)},
        )
    current = request.current
    if len(current) not in (0, 4 * request.num_layers * request.num_slots):
        raise Failure(Reason.INVALID_REQUEST, "the current placement has another shape")
    return PlanInput(
        loads=np.frombuffer(request.loads, dtype="<u4").reshape(shape),
        num_slots=request.num_slots,
        num_ranks=request.num_ranks,
        policy=Policy(request.policy or Policy.WINDOW),
        num_groups=request.num_groups or 1,
        num_nodes=request.num_nodes or 1,
        current=slots_from_bytes(current, request.num_slots),
        min_gain=request.min_gain or MIN_GAIN,
    )


def slots_from_bytes(data: bytes, num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Returns the slots per layer."""
    if not data:
        return ()
    table = np.frombuffer(data, dtype="<u4").reshape(-1, num_slots)
    return tuple(tuple(int(expert) for expert in layer) for layer in table)


def slots_to_bytes(slots: tuple[tuple[int, ...], ...]) -> bytes:
    """Returns the slots as little-endian u32, layer by layer."""
    return np.asarray(slots, dtype="<u4").tobytes()
