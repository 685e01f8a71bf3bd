"""The running stack with encrypted blocks on a shared folder: whose blocks are whose, what is
readable on the disk, and where the cluster's secret never appears."""

from __future__ import annotations

import base64
import io
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from PIL import Image

from deploy.local.plan import StackConfig
from services.common.rpc_client import Channels
from services.common.store_etcd import EtcdStore
from services.entrypoint.auth import Identity, StoredKey, digest_key, format_keys, parse_keys
from services.kvstore.client import StoreClient, tenant_tag
from services.kvstore.formats import FLAG_SEALED, ObjectHeader
from services.kvstore.hash_chain import salt_domain
from services.kvstore.inspect_files import shards_in
from services.kvstore.placement import SHARD_HEADER_BYTES
from services.kvstore.seal import domain_key
from tests.integration.conftest import MODEL
from tests.support.background_stack import BackgroundStack

T = TypeVar("T")
OTHER_KEY, OTHER_TENANT = "key-of-another-tenant", "another"


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[BackgroundStack]:
    folder = tmp_path_factory.mktemp("private")
    (folder / "mount").mkdir()
    config = StackConfig(
        folder=folder / "stack",
        num_prefill=1,
        num_decode=1,
        num_entrypoints=1,
        without=("eplb", "autoscaler"),
        backend="posix",
        backend_at=str(folder / "mount"),
        encryption="aes-256-gcm",
    )
    with BackgroundStack(config) as running:
        keys = running.stack.folder / "keys"
        stored = parse_keys((keys / "keys.json").read_text())
        digest = digest_key((keys / "pepper").read_bytes(), OTHER_KEY)
        other = StoredKey(Identity("other", OTHER_TENANT), digest)
        (keys / "keys.json").write_text(format_keys([*stored, other]))
        eventually(lambda: ask(running, "Hello", key=OTHER_KEY).status_code == 200, "the key")
        yield running


def eventually(read: Callable[[], T], what: str) -> T:
    """Waits for what other processes do in the background; the test's deadline bounds it."""
    for _ in range(600):
        if value := read():
            return value
        time.sleep(0.05)
    raise AssertionError(f"never came: {what}")


def ask(stack: BackgroundStack, content: Any, *, key: str = "", salt: str = "") -> httpx.Response:
    headers = {
        "authorization": f"Bearer {key or stack.key}",
        "x-request-id": f"private-{uuid.uuid4().hex}",
    }
    if salt:
        headers["x-pelagos-cache-salt"] = salt
    return httpx.post(
        f"{stack.url}/v1/chat/completions",
        headers=headers,
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "thinking": {"type": "disabled"},
            "max_tokens": 16,
        },
        timeout=60,
    )


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_cache_hit_tokens"])


def warm(stack: BackgroundStack, content: Any, **more: str) -> int:
    """Asks until the prompt is hit; returns how much of it."""
    return eventually(lambda: cached(ask(stack, content, **more)), "a hit")


def text(seed: str) -> str:
    return f"{seed} {uuid.uuid4()} " + "so long that it fills several blocks, " * 100


def on_disk(stack: BackgroundStack) -> list[ObjectHeader]:
    """Returns the header of every block whose bytes are on the shared folder."""
    mount = stack.stack.folder.parent / "mount"
    headers = []
    for found in shards_in(mount, verify=False):
        with (mount / found.file).open("rb") as file:
            file.seek(found.offset + SHARD_HEADER_BYTES)
            header = ObjectHeader.parse(file.read(256))
        assert header is not None
        headers.append(header)
    return headers


def test_ur_38_equal_prompts_of_two_tenants_share_nothing(stack):
    prompt = text("tenants")
    assert warm(stack, prompt) >= 128
    assert cached(ask(stack, prompt, key=OTHER_KEY)) == 0
    assert cached(ask(stack, prompt, salt="mine alone")) == 0
    # Each then hits what it stored itself.
    assert warm(stack, prompt, key=OTHER_KEY) >= 128
    assert warm(stack, prompt, salt="mine alone") >= 128
    assert cached(ask(stack, prompt, key=OTHER_KEY, salt="mine alone")) == 0


def test_ur_35_equal_placeholders_of_different_images_share_nothing(stack):
    def parts(shade: int, words: str) -> list[dict[str, Any]]:
        buffer = io.BytesIO()
        Image.new("RGB", (640, 480), (shade, 30, 40)).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]

    words = text("images")
    assert warm(stack, parts(200, words)) >= 256
    # As long, with the same placeholders and the same words behind them: one shade apart.
    assert cached(ask(stack, parts(201, words))) == 0
    assert warm(stack, parts(201, words)) >= 256


def test_s_11_every_block_on_the_disk_is_encrypted_and_marked_with_its_tenant(stack):
    warm(stack, text("at rest"))
    warm(stack, text("at rest"), key=OTHER_KEY)
    headers = on_disk(stack)
    assert headers
    assert all(header.flags & FLAG_SEALED for header in headers)
    tags = {header.tenant_tag for header in headers}
    assert tags == {tenant_tag("default"), tenant_tag(OTHER_TENANT)}


def test_second_turns_hit_after_a_restart_of_every_store_process(stack):
    prompt = text("restart")
    before = warm(stack, prompt)
    for name in ("store", "check"):
        process = stack.stack[name]
        pid = process.pid
        process.signal(signal.SIGKILL)
        eventually(lambda process=process, pid=pid: process.pid not in (0, pid), "a new process")
        stack.run(process.wait_ready())
    assert warm(stack, prompt) == before


def spellings(secret: bytes) -> list[bytes]:
    """Returns how a secret may be written."""
    return [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
        repr(secret)[2:-1].encode(),
        str(list(secret))[1:-1].encode(),
    ]


async def everything_in_etcd(endpoint: str) -> bytes:
    store = EtcdStore(endpoint)
    try:
        return b"\n".join(
            item.key.encode() + b"=" + bytes(item.value) for item in (await store.list("/")).items
        )
    finally:
        await store.close()


def test_the_cluster_key_is_in_no_log_metric_trace_or_etcd_value(stack):
    request_id = ask(stack, text("secrets")).headers["x-request-id"]
    ask(stack, text("secrets"), key=OTHER_KEY)
    eventually(lambda: request_id in str(stack.spans()), "its trace")
    folder = stack.stack.folder
    key = (folder / "keys" / "cluster-key").read_bytes()
    assert len(key) == 32
    secrets = [key]
    for tenant in ("default", OTHER_TENANT):
        secrets += [domain_key(key, tenant_tag(tenant)), salt_domain(key, "tenant", tenant, "")]

    where: dict[str, bytes] = {"etcd": stack.run(everything_in_etcd(stack.stack.etcd_endpoint))}
    for process in stack.stack:
        for page in ("/metrics", "/config", "/census", "/healthz", "/readyz"):
            where[process.name + page] = stack.admin(process.name, page).encode()
        proc = Path("/proc") / str(process.pid)
        where[f"{process.name} command"] = (proc / "cmdline").read_bytes()
        where[f"{process.name} environment"] = (proc / "environ").read_bytes()
    for path in [*folder.rglob("*"), *(folder.parent / "mount").rglob("*")]:
        is_key = path.parent.name == "keys"
        if path.is_file() and not is_key:
            where[str(path.relative_to(folder.parent))] = path.read_bytes()
    # The search finds what is there.
    assert any("/traces/" in name and request_id.encode() in text for name, text in where.items())
    assert any(name.endswith("store.log") and b"serving" in text for name, text in where.items())
    assert b"members/store" in where["etcd"]
    assert b"pelagos_" in where["store/metrics"]
    found = [
        name
        for name, text in where.items()
        for secret in secrets
        if any(spelling in text for spelling in spellings(secret))
    ]
    assert found == []


def test_s_11_delete_tenant_under_its_own_load_leaves_no_block_of_it(stack):
    warm(stack, text("erased"))
    kept = text("kept")
    kept_hit = warm(stack, kept, key=OTHER_KEY)
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            ask(stack, text("load"))

    async def delete() -> int:
        channels = Channels()
        try:
            address = stack.stack["store"].ready_document["address"]
            return await StoreClient(channels, address).delete_tenant("default")
        finally:
            await channels.close()

    workers = [threading.Thread(target=load) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(3):
            before = {h.put_id for h in on_disk(stack) if h.tenant_tag == tenant_tag("default")}
            assert stack.run(delete()) >= 0
            after = {h.put_id for h in on_disk(stack) if h.tenant_tag == tenant_tag("default")}
            assert not before & after
    finally:
        is_over.set()
        for worker in workers:
            worker.join()

    def is_gone() -> bool:
        # What the engines still held when the load ended may come in after a first pass.
        stack.run(delete())
        time.sleep(0.5)
        return all(header.tenant_tag != tenant_tag("default") for header in on_disk(stack))

    eventually(is_gone, "a disk without the tenant")
    assert cached(ask(stack, kept, key=OTHER_KEY)) == kept_hit
