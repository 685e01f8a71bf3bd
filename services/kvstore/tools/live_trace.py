"""`pelagos kv trace --store`: replays a trace against a running STORE, block by block.

Each id of the trace becomes one block of one token run, so that equal prefixes give equal keys; a
block's bytes are few, for what is measured is what the store finds again, not how fast. Each
request asks how much of its chain is stored, then puts the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections.abc import Sequence

from services.common.rpc_client import Channels
from services.kvstore.client import Block, StoreClient, chain, layout_fingerprint
from services.kvstore.trace import TOKENS_PER_ID, HitRatios, TraceRequest

_BLOCK_TOKENS = 128
_PAYLOAD_BYTES = 64
_PUTS_AT_ONCE = 512


async def replay_on_store(address: str, requests: Sequence[TraceRequest]) -> HitRatios:
    """Returns the ratios that the store gave; what it stored for that is erased again.

    Raises: Failure when the store is away.
    """
    channels = Channels()
    store = StoreClient(channels, address)
    tenant = f"pelagos-trace-{secrets.token_hex(8)}"
    root = secrets.token_bytes(32)
    layout = layout_fingerprint({"trace": 1, "payload_bytes": _PAYLOAD_BYTES})
    num_blocks = num_hit = num_tokens = num_hit_tokens = 0
    try:
        await store.stat()
        try:
            for request in requests:
                token_ids = b"".join(struct.pack("<I", i) * _BLOCK_TOKENS for i in request.ids)
                keys = chain(root, token_ids, _BLOCK_TOKENS)
                present = await store.exists(keys)
                hit = len(present) if all(present) else present.index(0)
                num_blocks += len(request.ids)
                num_hit += hit
                num_tokens += request.num_tokens
                num_hit_tokens += min(TOKENS_PER_ID * hit, request.num_tokens)
                missing = _blocks(root, keys, token_ids, layout, tenant)[hit:]
                for at in range(0, len(missing), _PUTS_AT_ONCE):
                    part = missing[at : at + _PUTS_AT_ONCE]
                    await asyncio.gather(*(store.put(block) for block in part))
        finally:
            await store.delete_tenant(tenant)
    finally:
        await store.close()
        await channels.close()
    return HitRatios(None, None, num_blocks, num_hit, num_tokens, num_hit_tokens)


def _blocks(root: bytes, keys: bytes, token_ids: bytes, layout: bytes, tenant: str) -> list[Block]:
    all_keys = [root, *(keys[at : at + 32] for at in range(0, len(keys), 32))]
    step = _BLOCK_TOKENS * 4
    return [
        Block(
            key=key,
            parent_key=all_keys[number],
            index=number + 1,
            token_ids=token_ids[number * step : (number + 1) * step],
            layout=layout,
            payload=hashlib.sha512(key).digest(),
            tenant=tenant,
        )
        for number, key in enumerate(all_keys[1:])
    ]
