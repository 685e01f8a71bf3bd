"""What leaves an engine with a sequence: its bytes, and its request without the pixels.

Source: engine.md, sections 1.10 and 7.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelagos.engine.v1 import kv_transfer_pb2 as pb
from pelagos.engine.v1 import records_pb2

from services.engine.runner import ModelRunner
from services.engine.transfer_client import Outgoing


def outgoing_pieces(
    runner: ModelRunner, seq_id: int, num_cached: int, table: Sequence[int]
) -> list[Outgoing]:
    """Every block below `num_cached`, the tail last, then the state: the order of the checksum."""
    geometry = runner.layout.geometry
    pieces = []
    for index in range(geometry.num_blocks(num_cached)):
        whole = (index + 1) * geometry.block_tokens <= num_cached
        kind = pb.CHUNK_KIND_BLOCK if whole else pb.CHUNK_KIND_TAIL
        pieces.append(Outgoing(kind, index, runner.read_block(table[index])))
    pieces.append(Outgoing(pb.CHUNK_KIND_STATE, 0, runner.read_state(seq_id)))
    return pieces


def request_without_pixels(spec: records_pb2.RequestSpec) -> records_pb2.RequestSpec:
    """The request as a record carries it: images as digests and spans, no cache match."""
    slim = records_pb2.RequestSpec()
    slim.CopyFrom(spec)
    slim.ClearField("hit")
    for item in slim.media:
        item.ClearField("data")
    return slim
