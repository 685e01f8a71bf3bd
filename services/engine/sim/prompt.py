"""A prompt computed on a simulated device of its own: what a prefill engine hands over.

For examples, tests and the conformance suite; no engine is needed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pelagos.engine.v1 import records_pb2 as pb

from services.engine.config import ModelConfig
from services.engine.handoff import outgoing_pieces
from services.engine.records import sampling_from_proto, tokens_from_spec
from services.engine.requests import Tokens
from services.engine.runner import (
    DecodeBatch,
    DecodeRow,
    ModelRunner,
    PrefillBatch,
    PrefillRow,
    Start,
)
from services.engine.transfer_client import Outgoing, checksum

_SPARE_BLOCKS = 150  # for `continued`


@dataclass
class Prefilled:
    """A sequence after its prompt; the record's epoch is the request's own."""

    record: pb.HandoffRecord
    pieces: list[Outgoing]
    num_tokens: int
    runner: ModelRunner
    tokens: Tokens
    table: list[int]

    async def continued(self, num: int) -> list[int]:
        """The tokens that must follow the first one, from a device that was never left."""
        said: list[int] = []
        num_cached, remap = self.num_tokens, -1
        while len(said) < num:
            row = DecodeRow(1, remap, num_cached, tuple(self.table), 1)
            step = self.runner.launch(DecodeBatch((row,), 1))
            self.runner.sample(step, {})
            output = (await self.runner.result(step)).outputs[1]
            said += [token.token_id for token in output.tokens]
            num_cached, remap = num_cached + 1, 0
        return said


async def prefilled(spec: pb.RequestSpec, model: ModelConfig) -> Prefilled:
    """Computes the prompt of a request and packs it for delivery."""
    geometry = model.geometry
    tokens = tokens_from_spec(spec, geometry)
    num = len(tokens)
    num_blocks = geometry.num_blocks(num) + _SPARE_BLOCKS
    runner = model.make_runner(num_blocks + 1, for_prefill=True)
    table = list(range(1, num_blocks + 1))
    sampling = sampling_from_proto(spec.sampling)
    num_prompt = num - spec.num_resumed_tokens
    runner.open(Start(1, spec.key.request_id, tokens, sampling, num_prompt, num, 1))
    row = PrefillRow(1, 0, num, 0, 0, True, tuple(table))
    first = (await runner.prefill(PrefillBatch((row,)))).first[1]
    pieces = outgoing_pieces(runner, 1, num, table)
    num_full = num // geometry.block_tokens
    record = pb.HandoffRecord(
        key=spec.key,
        spec=spec,
        output_tokens=first.token_id.to_bytes(4, "little"),
        num_cached=num,
        usage=pb.Usage(prompt_tokens=num_prompt, output_tokens=1),
        block_keys=b"".join(tokens.key(i) for i in range(num_full)),
        durable_blocks=bytes(num_full),
        state_bytes=runner.layout.state_bytes,
        state_position=num,
        layout_signature=runner.layout.signature,
        kv_checksum=checksum(pieces),
        coverage_tokens=num,
    )
    return Prefilled(record, pieces, num, runner, tokens, table)
