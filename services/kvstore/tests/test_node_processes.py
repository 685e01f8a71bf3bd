"""Twelve storage nodes as processes with a real etcd: killed and frozen under verified load."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest

from services.kvstore.tests.kit import blocks_of, token_ids
from services.kvstore.tests.process_kit import ROOT, all_right, loaded, node_processes


@pytest.mark.timeout(300)
async def test_p_31_p_32_nodes_killed_and_frozen_under_verified_load(tmp_path) -> None:
    async with node_processes(tmp_path) as n:
        written = blocks_of(ROOT, token_ids(1, 128 * 40))
        await n.put_all(written)
        n.capacity = (await n.counts())[0]
        async with loaded(n, written) as load:
            await load.progress(200)
            # Frozen, connections left open: eleven are asked, so nobody waits for it.
            n.nodes[7].signal(signal.SIGSTOP)
            await load.progress(200)
            n.nodes[7].signal(signal.SIGCONT)
            await n.whole()
            for first, second in ((2, 9), (0, 5)):
                await n.nodes[first].kill()
                await n.nodes[second].kill()
                await load.progress(200)
                for number in (first, second):
                    await n.nodes[number].start()
                await asyncio.gather(n.nodes[first].ready(), n.nodes[second].ready())
                # The two are in use again before the next two go.
                await n.whole()
                await load.progress(100)
            assert load.misses == [], load.log.read_text()[-3000:]
        # SIGKILL of every process of the store at once, then all of them again.
        await n.restart_all()
        await all_right(n.client, written)


class _Broken:
    """A client that fails as none should."""

    def fetch(self, *_):
        raise RuntimeError("broken")


@pytest.mark.timeout(30)
async def test_a_load_that_fails_ends_the_wait_for_its_progress(tmp_path) -> None:
    n = SimpleNamespace(client=_Broken(), folder=tmp_path)
    with pytest.raises(ExceptionGroup) as failed:
        async with loaded(n, blocks_of(ROOT, token_ids(1, 128 * 4))) as load:
            await load.progress(1, may_miss=True)
    assert failed.group_contains(RuntimeError, match="broken")
