"""Two writers, one reader, one eviction of one key: every order up to a bound, on the real code.

All orders without a bound: `python -m tests.campaign.kv_races`.
"""

from __future__ import annotations

import pytest

from services.kvstore.backends.base import ReadStatus
from services.kvstore.formats import State
from services.kvstore.storage.meta import Meta
from services.kvstore.store import cluster
from tests.campaign import kv_races
from tests.campaign.kv_races import EmbeddedWorld, NodesWorld, explore_races


def test_t_ec_mix_embedded_slots_given_away_in_the_middle_of_a_read_never_mix() -> None:
    done, seen = explore_races(EmbeddedWorld, max_preemptions=2)
    assert done.num_ends > 100
    # The reader was early, late, and in between.
    assert seen == {"a", "b", "miss"}


def test_t_ec_mix_shards_of_two_puts_and_an_eviction_never_mix() -> None:
    done, seen = explore_races(NodesWorld, max_preemptions=1)
    assert done.num_ends > 20
    assert seen == {"a", "b", "miss"}


def test_the_explorer_finds_a_tombstone_on_another_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the campaign once found: an eviction that ends after the key was put again."""
    monkeypatch.setattr(
        Meta, "bury", lambda self, key16, put_id: self.set_state(key16, State.TOMBSTONE)
    )
    with pytest.raises(AssertionError, match="left behind"):
        explore_races(EmbeddedWorld, max_preemptions=2)


def test_the_explorer_finds_shards_that_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that took shards of any put, and a check that let it through, would be seen."""
    monkeypatch.setattr(cluster, "_is_of", lambda *_: True)
    monkeypatch.setattr(cluster, "check_object", lambda *_: ReadStatus.OK)

    async def get_any(self, ref):
        def newest():
            return next((d for r, d in reversed(self._disk.items()) if r.shard == ref.shard), None)

        data = await self._gate.step(f"get {self._node}", newest)
        return data, ReadStatus.ABSENT if data is None else ReadStatus.OK

    monkeypatch.setattr(kv_races._MemoryLink, "_get", get_any)
    with pytest.raises(AssertionError, match="nobody has put"):
        explore_races(NodesWorld, max_preemptions=2)
