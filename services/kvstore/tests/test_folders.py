"""Folders, files and values that a process cannot start with: each is named in one line, and what
lies in the folder is as it was."""

from __future__ import annotations

import asyncio
import errno

import pytest

from services.common.config import ConfigError
from services.common.service import running
from services.kvstore import cli, folders
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.cluster_key import cluster_key_of
from services.kvstore.config import (
    CheckConfig,
    GcConfig,
    SharedConfig,
    StorageNodeConfig,
    StoreConfig,
)
from services.kvstore.folders import MadeFor, check_made_for, note_made_for
from services.kvstore.placement import Profile
from services.kvstore.storage import main as node_main
from services.kvstore.store import main as store_main
from services.kvstore.tests.cluster_kit import node_config
from services.kvstore.tests.kit import LAYOUT, blocks_of, stack, store_config, token_ids
from services.kvstore.tests.test_tools import filled, flags_of

pytestmark = pytest.mark.timeout(60)


def config_error(group: BaseException) -> ConfigError:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    assert isinstance(group, ConfigError), group
    return group


async def start(name, config, build) -> ConfigError:
    with pytest.raises((ConfigError, BaseExceptionGroup)) as raised:
        async with running(name, config, build):
            pass
    return config_error(raised.value)


async def test_a_folder_in_use_or_no_folder_is_said_so(tmp_path) -> None:
    config = store_config(tmp_path)
    async with running("store", config, store_main.build):
        error = await start("store", config, store_main.build)
        assert str(error) == f"dir {config.dir}: another process uses it"
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        for name, odd, build in (
            ("store", store_config(tmp_path, dir=folder), store_main.build),
            ("storage-node", node_config(tmp_path, 1, dir=folder, node_id=""), node_main.build),
        ):
            error = await start(name, odd, build)
            assert str(folder) in str(error)
            assert "file where a folder" in str(error)


def test_what_is_wrong_with_a_disk_is_said_and_a_wait_is_no_disk() -> None:
    with pytest.raises(ConfigError, match="Read-only"), folders.using("kv"):
        raise OSError(errno.EROFS, "os error 30")
    with pytest.raises(TimeoutError), folders.using("kv"):
        raise TimeoutError


async def test_blocks_survive_a_start_with_another_block_size(tmp_path) -> None:
    """It once took the slots for empty and wrote over them."""
    blocks = blocks_of(bytes(32), token_ids(1, 1280))
    async with stack(tmp_path) as s:
        await s.put_all(blocks)
    before = files_of(tmp_path / "kv")
    other = store_config(tmp_path, payload_bytes=114_688)
    error = await start("store", other, store_main.build)
    assert "8192" in str(error)
    assert "payload_bytes" in str(error)
    flags = [flag for flag in flags_of(tmp_path / "kv") if "payload" not in flag]
    assert await asyncio.to_thread(cli.main, ["repair", *flags]) == 1, "nor does a tool"
    assert files_of(tmp_path / "kv") == before
    keys = b"".join(block.key for block in blocks)
    async with (
        stack(tmp_path, payload_bytes=5001) as s,  # as large in whole pages
        s.store.fetch(keys, LAYOUT) as parts,
    ):
        assert all([part.is_ok async for part in parts])


async def test_a_store_a_node_and_another_cluster_keep_out_of_each_others_folders(tmp_path) -> None:
    await filled(tmp_path / "a")
    stores = files_of(tmp_path / "a" / "kv")
    node = node_config(tmp_path, 1, dir=tmp_path / "a" / "kv")
    assert "shards of 1+0, not of 10+2" in str(await start("storage-node", node, node_main.build))
    assert {k: v for k, v in files_of(tmp_path / "a" / "kv").items() if k in stores} == stores

    own = node_config(tmp_path, 2)
    async with running("storage-node", own, node_main.build):
        pass
    before = files_of(own.dir)
    error = await start("store", store_config(tmp_path, dir=own.dir), store_main.build)
    assert "shards of 10+2, not of 1+0" in str(error)
    other = node_config(tmp_path, 2, runtime=type(own.runtime)(cluster="other"))
    error = await start("storage-node", other, node_main.build)
    assert "belongs to cluster 'local', not 'other'" in str(error)
    assert files_of(own.dir) == before


def files_of(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_note_that_is_damaged_or_has_no_room_keeps_nobody_out(tmp_path, monkeypatch) -> None:
    made_for, other = MadeFor(8192, "1+0"), MadeFor(4096, "1+0")
    note_made_for(tmp_path, made_for)
    with pytest.raises(ConfigError):
        check_made_for(tmp_path, other)
    whole = (tmp_path / "made-for").read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (tmp_path / "made-for").write_bytes(damaged)
        check_made_for(tmp_path, made_for)
    (tmp_path / "made-for").write_bytes(whole[:-12])
    check_made_for(tmp_path, other)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.os, "fdopen", full)
    note_made_for(tmp_path, other)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["made-for"]


async def test_the_same_folder_opens_again_and_again(tmp_path) -> None:
    config = LocalBackendConfig(tmp_path / "s", 1 << 20, 1 << 19, 5000, Profile(2, 1), cluster="c")
    for _ in range(3):
        await (await LocalBackend.open(config)).close()
    assert (tmp_path / "s" / "made-for").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["node id", "", "../x", "a/b", "a" * 65, "\0", "é"])
async def test_a_node_id_that_no_key_can_hold_is_refused(name, tmp_path) -> None:
    if name:
        with pytest.raises(ValueError, match="node_id"):
            StorageNodeConfig(node_id=name)
    config = node_config(tmp_path, 1, node_id="")
    config.dir.mkdir()
    (config.dir / "node-id").write_text(name)
    assert "node-id" in str(await start("storage-node", config, node_main.build))


@pytest.mark.parametrize("place", ["", "file/key", "short", "open"])
def test_a_key_file_that_cannot_be_used_is_named(place, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "short").write_bytes(bytes(31))
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").write_bytes(bytes(32))
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ConfigError, match="cluster_key_file"):
        cluster_key_of(str(tmp_path / place))


ODD = [
    *((StoreConfig, name, value) for name, value in (
        ("segment_bytes", 0), ("capacity_bytes", 0), ("max_queued_put_bytes", -1),
        ("max_inflight_fetch_bytes", 0), ("hedge_ms", -1.0), ("read_timeout_ms", 0.0),
        ("put_timeout_ms", -3.0), ("gc_every_s", 0.0), ("gc_orphans_every_s", -1.0),
        ("gc_max_deletes_per_s", 0.0), ("scrub_bytes_per_s", -1.0),
        ("payload_bytes", 99_999_999_999),
    )),
    (SharedConfig, "linger_ms", -1.0),
    (SharedConfig, "reap_after_days", -1.0),
    *((StorageNodeConfig, name, value) for name, value in (
        ("segment_bytes", -1), ("capacity_bytes", 0), ("repair_bytes_per_s", 0.0),
        ("keeper_every_s", 0.0), ("out_after_s", -1.0), ("scrub_bytes_per_s", -1.0),
        ("gc_every_s", -1.0), ("profile", "10"), ("profile", "x"), ("payload_bytes", 1 << 40),
    )),
    (GcConfig, "max_deletes_per_s", 0.0),
    (GcConfig, "orphans_every_s", 0.0),
    (CheckConfig, "max_queued_touches", 0),
    (CheckConfig, "max_session_bytes", -1),
    (CheckConfig, "lookup_budget_ms", -1.0),
    (CheckConfig, "lagging_after_ms", -1.0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value"), ODD)
def test_a_value_that_would_stall_or_unbound_a_process_stops_its_start(kind, name, value) -> None:
    kind()
    with pytest.raises(ValueError, match=name):
        kind(**{name: value})
