"""`pelagos kv bench`: what a running STORE gives one engine, through shared memory, checked.

A chain of random blocks of a tenant made for it is put, looked for and fetched; every byte that
comes back is compared. The tenant is erased at the end.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.rpc_client import Channels
from services.common.shm_ring import SlotRing
from services.kvstore.client import Block, StoreClient, chain, layout_fingerprint

_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Rates:
    """Seconds of each round, by what was done."""

    num_blocks: int
    payload_bytes: int
    put_s: list[float]
    exists_s: list[float]
    fetch_s: list[float]

    def lines(self) -> list[str]:
        """Returns a table: medians over the rounds."""
        text = [f"{'':8} {'median':>10} {'per block':>11} {'MB/s':>9}"]
        for name, rounds in (
            ("put", self.put_s),
            ("exists", self.exists_s),
            ("fetch", self.fetch_s),
        ):
            spent_s = statistics.median(rounds)
            rate = self.num_blocks * self.payload_bytes / spent_s / 1e6
            moved = f"{rate:9.0f}" if name != "exists" else f"{'-':>9}"
            per_block = f"{spent_s / self.num_blocks * 1e6:8.1f} us"
            text.append(f"{name:8} {spent_s * 1e3:7.1f} ms {per_block:>11} {moved}")
        return text


async def bench_store(
    address: str, *, num_blocks: int, payload_bytes: int, num_rounds: int
) -> Rates:
    """Measures a STORE on this machine.

    Raises: Failure when it is away; ValueError when it dropped a block or gave a wrong one.
    """
    channels = Channels()
    store = StoreClient(channels, address)
    rates = Rates(num_blocks, payload_bytes, [], [], [])
    tenant = f"pelagos-bench-{secrets.token_hex(8)}"
    ring = SlotRing.create("kv-bench", payload_bytes, num_blocks)
    try:
        await store.stat()  # a store that is away is said before a block is made
        try:
            for _ in range(num_rounds):
                blocks = _chain(num_blocks, payload_bytes, tenant)
                await _round(store, ring, blocks, rates)
        finally:
            # Also after a round that failed: what was put is nobody's.
            await store.delete_tenant(tenant)
    finally:
        ring.close()
        await store.close()
        await channels.close()
    return rates


def _chain(num_blocks: int, payload_bytes: int, tenant: str) -> list[Block]:
    root = secrets.token_bytes(32)
    layout = layout_fingerprint({"bench": 1, "payload_bytes": payload_bytes})
    token_ids = secrets.token_bytes(num_blocks * _BLOCK_TOKENS * 4)
    keys = chain(root, token_ids, _BLOCK_TOKENS)
    all_keys = [root, *(keys[at : at + 32] for at in range(0, len(keys), 32))]
    step = _BLOCK_TOKENS * 4
    return [
        Block(
            key=all_keys[number + 1],
            parent_key=all_keys[number],
            index=number + 1,
            token_ids=token_ids[number * step : (number + 1) * step],
            layout=layout,
            payload=secrets.token_bytes(payload_bytes),
            tenant=tenant,
        )
        for number in range(num_blocks)
    ]


async def _round(store: StoreClient, ring: SlotRing, blocks: Sequence[Block], rates: Rates) -> None:
    keys = b"".join(block.key for block in blocks)
    slots = range(len(blocks))
    for slot, block in zip(slots, blocks, strict=True):
        ring.view(slot)[:] = block.payload
    shared = [
        replace(block, payload=b"", slot=slot, num_bytes=len(block.payload))
        for slot, block in zip(slots, blocks, strict=True)
    ]
    started_s = time.perf_counter()
    statuses = await asyncio.gather(*(store.put(block, ring) for block in shared))
    rates.put_s.append(time.perf_counter() - started_s)
    if not all(status.is_stored for status in statuses):
        bad = next(status for status in statuses if not status.is_stored)
        raise ValueError(
            f"a put ended as {bad.name}: too small a store, or a --payload larger than its "
            "payload_bytes; fewer --blocks may help"
        )
    for slot in slots:
        ring.view(slot)[:] = bytes(len(ring.view(slot)))
    started_s = time.perf_counter()
    present = await store.exists(keys)
    rates.exists_s.append(time.perf_counter() - started_s)
    started_s = time.perf_counter()
    async with store.fetch(keys, blocks[0].layout, ring=ring, slots=slots) as parts:
        num_ok = sum([part.is_ok async for part in parts])
    rates.fetch_s.append(time.perf_counter() - started_s)
    is_right = all(
        bytes(ring.view(slot)) == block.payload for slot, block in zip(slots, blocks, strict=True)
    )
    if num_ok != len(blocks) or not all(present) or not is_right:
        raise ValueError(f"{num_ok} of {len(blocks)} blocks came back")
