"""Matching: keys of a prompt, look-ups in the index, memory of the index.

Peers: SGLang's radix tree over the same tokens, Redis with the same records.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from services.kvstore.benchmarks.timing import Case, Section, ratio, take_turns
from services.kvstore.check.match import Matcher, Prompt
from services.kvstore.check.replica import Replica
from services.kvstore.hash_chain import Identity, SessionChains, chain, chain_plain, root_of
from services.kvstore.index_table import TTL_S, Fields, IndexTable, new_table

CLUSTER_KEY: Final = bytes(range(32))
IDENTITY: Final = Identity(model_id="model@rev0", layout=bytes(32), tenant="acme")
BLOCK: Final = 128
NUM_TOKENS: Final = 1 << 20
NUM_BLOCKS: Final = NUM_TOKENS // BLOCK
NOW_S: Final = 600 * 2_900_000
_NUM_TURNS: Final = 64  # of the conversation that SGLang's tree holds
_END_S: Final = 30.0
_RECORD: Final[Fields] = (7, 1, NOW_S, NOW_S // 600, 0xFFF, 1, 2, 0)


def run(quick: bool, log: Callable[[str], None]) -> list[Section]:
    """Measures everything of this part."""
    return [_match(quick, log), _existence(quick, log), _index(quick)]


def fill(table: IndexTable, keys: bytes, stride: int) -> None:
    """Stores these keys."""
    for at in range(0, len(keys), stride):
        table.set(keys[at : at + 16], _RECORD)


def _replica(keys: bytes, num_others: int) -> Replica:
    """Returns a replica that holds these full keys and so many blocks of others."""
    replica = Replica()
    fill(replica.table, keys, 32)
    # Keys are cut from digests: random bytes are what they look like.
    fill(replica.table, os.urandom(16 * num_others), 16)
    return replica


async def _no_window(keys: Sequence[Any]) -> Sequence[None]:
    return [None] * len(keys)


def _match(quick: bool, log: Callable[[str], None]) -> Section:
    section = Section(
        "Match of 1,048,576 tokens",
        "Ours is all that CHECK does for it but the RPC: root, 8,192 keys hashed, look-ups in an"
        " index of a million blocks (a quick look: 100,000), hit rule. SGLang's tree holds the"
        " same tokens, grown in 64 turns of 16,384; it compares"
        " tokens of one process where ours names blocks of a cluster."
        " The follow-up is the same session 512 tokens later.",
    )
    tokens = os.urandom(4 * NUM_TOKENS)
    root = root_of(CLUSTER_KEY, IDENTITY)
    keys = chain(root, tokens, BLOCK)
    replica = _replica(keys, 100_000 if quick else 1_000_000)
    sessions = SessionChains()
    matcher = Matcher(CLUSTER_KEY, replica, sessions)
    turns = 9 if quick else 41
    tail = os.urandom(4 * 4 * BLOCK * (turns + 2))
    longer = [tokens + tail[: 16 * BLOCK * turn] for turn in range(1, turns + 3)]

    def match(token_ids: bytes, session: str = "") -> int:
        prompt = Prompt(token_ids, IDENTITY, session_id=session)
        with contextlib.closing(matcher.match(prompt, _no_window, NOW_S, False)) as steps:
            try:
                steps.send(None)
            except StopIteration as end:
                return int(end.value.hit.stored_tokens)
        raise AssertionError("a match without a directory never waits")

    assert match(tokens) == NUM_TOKENS - 2 * BLOCK  # L - 134, rounded down
    match(tokens, "session")
    cases = [
        Case("ours", lambda turn: match(tokens)),
        Case("ours, hashing alone", lambda turn: chain(root, tokens, BLOCK)),
        Case("hashing in plain Python", lambda turn: chain_plain(root, tokens, BLOCK)),
        Case("ours, follow-up", lambda turn: match(longer[turn], "session")),
    ]
    peer = _sglang(tokens, log)
    if peer is not None:
        cases += [Case(name, partial(_call, run)) for name, run in peer.items()]
    times = take_turns(cases, turns)
    section.add(times, lambda s: 1e3 * s, "ms")
    section.claim_at_most("1M-token match, hashing included", 3.5, 1e3 * times["ours"].cpu, " ms")
    best = min(peer, key=lambda name: times[name].cpu) if peer else None
    against = ratio(times, "ours", best) if best else None
    section.claim_at_most("the same, over SGLang's tree of 64 turns", 0.25, against, "")
    return section


def _call(run: Callable[[], Any], turn: int) -> None:
    run()


def _sglang(tokens: bytes, log: Callable[[str], None]) -> dict[str, Callable[[], Any]] | None:
    """Returns a match in SGLang's tree, by page size; None when it is not there."""
    try:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    except Exception as error:  # whatever a peer's import needs and does not find
        log(f"SGLang's radix cache left out: {error!r}")
        return None
    ids = array("q", array("I", tokens))
    runs: dict[str, Callable[[], Any]] = {}
    for page_size in (1, BLOCK):
        tree = RadixCache.create_simulated(page_size=page_size)
        for turn in range(1, _NUM_TURNS + 1):
            size = turn * NUM_TOKENS // _NUM_TURNS
            key = RadixKey(ids[:size])
            tree.insert(InsertParams(key=key, value=torch.arange(size)))

        def run(tree: Any = tree) -> None:
            found = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
            assert found.device_prefix_len == NUM_TOKENS

        runs[f"SGLang's radix tree, page {page_size}"] = run
    return runs


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[Any, int]]:
    """Yields a client of a fresh Redis on a Unix socket, and the server's pid.

    Raises: OSError, ImportError when there is no server or no client.
    """
    import redis

    binary = shutil.which("redis-server")
    if binary is None:
        raise OSError("redis-server is not installed")
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "redis.sock"
        options = {"port": "0", "unixsocket": str(socket), "save": "", "appendonly": "no"}
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        process = subprocess.Popen([binary, *flags], stdout=subprocess.DEVNULL, cwd=directory)
        try:
            client = redis.Redis(unix_socket_path=str(socket))
            retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
            # An answer that does not come ends the part instead of holding it for ever.
            client.connection_pool.connection_kwargs["socket_timeout"] = _END_S
            client.connection_pool.connection_kwargs["retry"] = retry
            client.ping()
            yield client, process.pid
            client.close()
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _existence(quick: bool, log: Callable[[str], None]) -> Section:
    section = Section(
        "Existence of 8,192 blocks",
        "Ours asks CHECK's own copy of the index, of a million blocks (100,000). Redis (Unix"
        " socket, client with hiredis) holds records of 48 bytes under the"
        " same keys; its time is that of client"
        " and server.",
    )
    num = 100_000 if quick else 1_000_000
    keys = os.urandom(16 * num)
    table = new_table()
    fill(table, keys, 16)

    def asked(turn: int) -> bytes:
        first = turn * NUM_BLOCKS % (num - NUM_BLOCKS)
        return keys[16 * first : 16 * (first + NUM_BLOCKS)]

    def ours(turn: int) -> None:
        assert table.match_prefix(asked(turn), 16, NOW_S, TTL_S)[0] == NUM_BLOCKS

    cases = [Case("ours", ours)]
    with contextlib.ExitStack() as stack:
        try:
            client, pid = stack.enter_context(redis_server())
        except (OSError, ImportError) as error:
            log(f"Redis left out: {error!r}")
        else:
            record = bytes(48)
            for at in range(0, num, 10_000):
                some = range(16 * at, 16 * min(at + 10_000, num), 16)
                client.mset({keys[i : i + 16]: record for i in some})

            def mget(turn: int) -> None:
                raw = asked(turn)
                found = client.mget([raw[i : i + 16] for i in range(0, len(raw), 16)])
                assert None not in found

            def exists(turn: int) -> None:
                raw = asked(turn)
                assert client.exists(*(raw[i : i + 16] for i in range(0, len(raw), 16)))

            cases += [Case("Redis MGET", mget, (pid,)), Case("Redis EXISTS", exists, (pid,))]
        times = take_turns(cases, 9 if quick else 41)
    section.add(times, lambda s: 1e3 * s, "ms")
    against = ratio(times, "Redis MGET", "ours") if "Redis MGET" in times else None
    section.claim_at_least("existence of 8,192 blocks, times faster than MGET", 40, against, " x")
    return section


def _index(quick: bool) -> Section:
    num = 1_000_000 if quick else 10_000_000
    section = Section(
        f"Index of {num:,} blocks",
        "Blocks that lie far apart, asked for once each: every look-up misses the caches. The"
        " bytes are all that the table holds, growth included.",
    )
    table = new_table()
    most, sample = 0.0, b""
    while len(table) < num:
        keys = os.urandom(16 << 16)
        fill(table, keys, 16)
        if len(table) > num // 2:
            most = max(most, table.memory_bytes() / len(table))
        sample += keys[: 16 * (NUM_BLOCKS // 4)]

    def ours(turn: int) -> None:
        at = 16 * NUM_BLOCKS * turn % (len(sample) - 16 * NUM_BLOCKS)
        found, _ = table.match_prefix(sample[at : at + 16 * NUM_BLOCKS], 16, NOW_S, TTL_S)
        assert found == NUM_BLOCKS

    times = take_turns([Case("8,192 look-ups, cold", ours)], 9 if quick else 31)
    section.add(times, lambda s: 1e3 * s, "ms")
    section.claim_at_most(f"index at {num:,} blocks, bytes per block", 64, most, " B")
    return section
