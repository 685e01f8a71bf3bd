"""A match against an index that lags, in either kind of index; what the answer says of it."""

from services.kvstore.check.match import Matcher, Prompt
from services.kvstore.check.replica import Replica
from services.kvstore.formats import LOG_ENTRY_BYTES
from services.kvstore.hash_chain import Identity, SessionChains, chain, root_of
from services.kvstore.hit_policy import EndedBy
from services.kvstore.index_table import OP_SET, encode_entry
from services.kvstore.tests.kit import LAYOUT, token_ids

CLUSTER_KEY = bytes(range(32))
IDENTITY = Identity(model_id="model@rev0", layout=LAYOUT, tenant="acme")
EPOCH_S = 600


async def no_states(keys):
    return [None] * len(keys)


def entries_of(keys: bytes, numbers: range) -> bytes:
    """Commits of the blocks, in order."""
    fields = (7, 0, 0, 5, 1, 1, 2, 0)
    return b"".join(
        encode_entry(n + 1, OP_SET, keys[32 * n : 32 * n + 16], fields, bytes(16), 1024)
        for n in numbers
    )


async def test_t_match_lag_gives_the_older_shorter_prefix_and_no_error() -> None:
    """The log comes five seconds late: what it has told so far is a right, shorter answer."""
    tokens = token_ids(1, 128 * 10 + 200)
    keys = chain(root_of(CLUSTER_KEY, IDENTITY), tokens, 128)
    log = entries_of(keys, range(10))
    replica = Replica()
    matcher = Matcher(CLUSTER_KEY, replica, SessionChains(10, 1 << 20))
    prompt = Prompt(tokens, IDENTITY)

    async def stored(now_s: float) -> int:
        is_lagging = replica.lag_ms(now_s) >= 5_000
        return (await matcher.match(prompt, no_states, EPOCH_S * 6, is_lagging)).hit.stored_tokens

    part = 6 * LOG_ENTRY_BYTES
    assert replica.take("log", log[:part], 7, True, True, now_s=0.0)
    assert await stored(0.0) == 6 * 128
    # Blocks 7 to 10 are committed now, and their log entries are on their way for five seconds.
    assert await stored(5.0) == 6 * 128
    assert replica.num_stored(keys, EPOCH_S * 6, is_lagging=True) == (6, EndedBy.LAGGING)
    assert replica.take("log", log[part:], 11, False, True, now_s=5.0)
    # All ten, as far as the rule's cap lets a hit go.
    assert await stored(5.0) == (128 * 10 + 200 - 134) // 128 * 128
