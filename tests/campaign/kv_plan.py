"""What a seed of the crash campaign does: the store, the work of each life, and how it ends. Pure.

A seed is a store and a few lives of one process over it. Each life opens the store, checks all it
ever had, works, and ends badly; the next life begins with what that left on the disk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

from services.kvstore.hash_chain import chain
from services.kvstore.store.blocks import NewBlock

BLOCK_TOKENS: Final = 16
PAYLOAD_BYTES: Final = 3000
SLOT_BYTES: Final = 4096
LAYOUT: Final = bytes([9]) * 32
NUM_CHAINS: Final = 6
CHAIN_BLOCKS: Final = 6

# How a life ends. Every one of them is a kill -9 first; `power` and the damages then change files.
Fault = Literal["kill", "power", "truncate", "flip", "torn", "full"]
FAULTS: Final[tuple[Fault, ...]] = ("kill", "power", "truncate", "flip", "torn", "full")
OpKind = Literal["put", "read", "touch", "collect", "erase", "scrub", "pin"]


@dataclass(frozen=True)
class Op:
    """One thing that a life does. `chain`, `block` and `variant` mean what the kind needs."""

    kind: OpKind
    chain: int = 0
    block: int = 0
    variant: int = 0  # 0 the exact block, 1 an approximate one of the same key


@dataclass(frozen=True)
class Life:
    """The work of one process, and its end."""

    ops: tuple[Op, ...]
    num_parallel: int
    fault: Fault
    kill_after: int  # answers seen by the one who kills
    torn_write: int  # number of the write in which it dies instead; 0: killed from outside
    max_file_bytes: int  # 0: no bound


@dataclass(frozen=True)
class Plan:
    """A store and its lives; after the last one everything is checked once more."""

    seed: int
    durable: bool
    plain: bool  # the twin in Python instead of the native store
    segment_slots: int
    num_slots: int
    lives: tuple[Life, ...]


def plan_of(seed: int) -> Plan:
    """Returns what a seed does."""
    rng = random.Random(f"kv-crash {seed}")
    plain = rng.random() < 0.3
    segment_slots = rng.choice((2, 4, 8))
    usual = FAULTS[seed % len(FAULTS)]
    return Plan(
        seed=seed,
        durable=rng.random() < 0.7,
        plain=plain,
        segment_slots=segment_slots,
        num_slots=segment_slots * rng.choice((4, 6, 10)),
        lives=tuple(_life(rng, plain, usual) for _ in range(rng.choice((1, 2, 3)))),
    )


def _life(rng: random.Random, plain: bool, usual: Fault) -> Life:
    fault = usual if rng.random() < 0.7 else rng.choice(FAULTS)
    ops = tuple(_op(rng) for _ in range(rng.randrange(20, 90)))
    bounds = (rng.randrange(1, 8192), rng.randrange(8192, 14_000), SLOT_BYTES * rng.randrange(2, 9))
    return Life(
        ops=ops,
        num_parallel=rng.choice((1, 2, 4)),
        fault=fault,
        kill_after=rng.randrange(1, len(ops)),
        # Only the twin's writes can be cut in the middle: they go through Python.
        torn_write=rng.randrange(1, 120) if plain and rng.random() < 0.5 else 0,
        max_file_bytes=rng.choice(bounds) if fault == "full" else 0,
    )


def _op(rng: random.Random) -> Op:
    kind = rng.choices(
        ("put", "read", "touch", "collect", "erase", "scrub", "pin"), (60, 12, 6, 8, 3, 2, 3)
    )[0]
    return Op(
        kind,  # type: ignore[arg-type]
        chain=rng.randrange(NUM_CHAINS),
        block=min(rng.randrange(CHAIN_BLOCKS), rng.randrange(CHAIN_BLOCKS)),
        variant=int(rng.random() < 0.25),
    )


def tokens_of(chain_number: int, seed: int) -> bytes:
    """Returns the token bytes of a chain."""
    return random.Random(f"tokens {seed} {chain_number}").randbytes(4 * BLOCK_TOKENS * CHAIN_BLOCKS)


def keys_of(chain_number: int, seed: int) -> list[bytes]:
    """Returns the root and the keys of a chain."""
    root = bytes([chain_number]) * 32
    keys = chain(root, tokens_of(chain_number, seed), BLOCK_TOKENS)
    return [root, *(keys[at : at + 32] for at in range(0, len(keys), 32))]


def payload_of(key: bytes, variant: int) -> bytes:
    """Returns the only right bytes of a variant of a block."""
    size = PAYLOAD_BYTES - variant * 100
    return random.Random(key + bytes([variant])).randbytes(size)


def tenant_of(chain_number: int) -> bytes:
    """Returns the tag of the tenant that owns a chain."""
    return bytes([100 + chain_number % 3]) * 16


def block_of(op: Op, seed: int) -> NewBlock:
    """Returns the block of a put."""
    keys = keys_of(op.chain, seed)
    return NewBlock(
        key=keys[op.block + 1],
        parent=keys[op.block],
        layout=LAYOUT,
        block_index=op.block + 1,
        num_tokens=BLOCK_TOKENS,
        ttl_class=2,
        payload=payload_of(keys[op.block + 1], op.variant),
        flags=4 if op.variant else 2,
        tenant_tag=tenant_of(op.chain),
    )
