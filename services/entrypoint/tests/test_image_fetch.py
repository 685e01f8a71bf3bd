"""Image addresses: off by default, and nothing inside is reachable when they are on (S-04)."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import Failure, Reason
from services.entrypoint.address_policy import (
    Address,
    Target,
    UrlPolicy,
    check_answers,
    check_url,
    is_allowed,
)
from services.entrypoint.auth import Identity
from services.entrypoint.image_fetch import FetchLimits, ImageFetcher

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
WHO = Identity("k", "t")
OPEN = UrlPolicy(allow_http=True)

REFUSED = [
    # UR-74: what is inside, by default.
    "https://127.0.0.1/a.png",
    "https://169.254.169.254/latest/meta-data",
    "https://10.1.2.3/",
    "https://172.16.0.1/",
    "https://192.168.1.1/",
    "https://100.64.0.1/",
    "https://[::1]/",
    "https://[fe80::1]/",
    "https://[fd00::1]/",
    "https://localhost/",
    "https://a.localhost/",
    "https://metadata.google.internal/",
    "https://router.local/",
    "https://0.0.0.0/",
    "https://224.0.0.1/",
    "https://198.18.0.1/",
    "https://192.0.2.1/",
    "https://255.255.255.255/",
    # UR-75: odd spellings of the same.
    "https://0x7f000001/",
    "https://2130706433/",
    "https://0177.0.0.1/",
    "https://127.1/",
    "https://127.0.0.1./",
    "https://0x7f.0.0.1/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[2002:7f00:1::]/",
    "https://[2001:0:7f00:1::]/",
    "https://[::ffff:7f00:1]/",
    "https://[fe80::1%25eth0]/",
    "https://user@example.org/",
    "https://example.org@127.0.0.1/",
    "https://example.org\\@127.0.0.1/",
    "http:\\\\127.0.0.1\\a",
    "https:/\\127.0.0.1/",
    "https://example.org:8443/",
    "https://example.org:22/",
    "https://example.org./",
    "https://exa mple.org/",
    "https://ex%61mple.org/",
    "https://example/",
    "https://ｅxample.org/",
    "https://example.org\t/",
    "https://",
    "https:///a",
    "file:///etc/passwd",
    "gopher://example.org/",
    "ftp://example.org/",
    "//example.org/",
    "https://[::1",
    "https://" + "a" * 300 + ".org/",
    "https://example.org/" + "a" * 9000,
]


@pytest.mark.parametrize("url", REFUSED)
def test_ur_74_ur_75_refused_as_spelled(url: str) -> None:
    for policy in (UrlPolicy(), OPEN):
        with pytest.raises(Failure) as caught:
            check_url(url, policy)
        assert caught.value.reason is Reason.IMAGE_BLOCKED
        assert url not in caught.value.message


def test_http_needs_its_own_permission() -> None:
    with pytest.raises(Failure):
        check_url("http://example.org/", UrlPolicy())
    assert check_url("http://example.org/a?b=c", OPEN).path == "/a?b=c"
    assert check_url("https://example.org:443/a#f", OPEN) == Target(
        "https", "example.org", 443, "/a", None
    )
    assert check_url("https://8.8.8.8/", OPEN).literal == ipaddress.ip_address("8.8.8.8")


def test_a_domain_list_leaves_nothing_else() -> None:
    policy = UrlPolicy(domains=("example.org",))
    assert check_url("https://img.example.org/", policy)
    for url in ("https://example.com/", "https://notexample.org/", "https://8.8.8.8/"):
        with pytest.raises(Failure):
            check_url(url, policy)


def test_one_bad_answer_spoils_all() -> None:
    assert check_answers(["8.8.8.8", "2606:4700::1111"], OPEN)
    for answers in (["8.8.8.8", "10.0.0.1"], ["::1"], [], ["fe80::1%eth0"]):
        with pytest.raises(Failure) as caught:
            check_answers(answers, OPEN)
        assert caught.value.reason is Reason.IMAGE_FETCH
    denied = UrlPolicy(denied_networks=(ipaddress.ip_network("8.8.8.0/24"),))
    with pytest.raises(Failure):
        check_answers(["8.8.8.8"], denied)


@given(st.integers(0, 2**32 - 1))
def test_no_address_is_allowed_that_the_library_calls_not_global(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    if not address.is_global or address.is_multicast:
        assert not is_allowed(address)
    # In disguise it is not allowed at all, global or not.
    for text in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"):
        assert not is_allowed(ipaddress.ip_address(text))


@given(st.integers(0, 2**128 - 1))
def test_no_ipv6_address_is_allowed_that_the_library_calls_not_global(number: int) -> None:
    address = ipaddress.IPv6Address(number)
    if not address.is_global or address.is_multicast:
        assert not is_allowed(address)


async def test_ur_74_switched_off_sends_no_packet() -> None:
    async def connect(address: Address, target: Target) -> object:
        raise AssertionError("a connection was made")

    async def resolve(host: str, port: int) -> list[str]:
        raise AssertionError("a name was asked for")

    fetcher = ImageFetcher(None, resolve=resolve, connect=connect)  # type: ignore[arg-type]
    for url in ("https://example.org/a.png", "https://127.0.0.1/a"):
        with pytest.raises(Failure) as caught:
            await fetcher.inline(b"{}", [url], WHO)
        assert caught.value.reason is Reason.IMAGE_BLOCKED


# ---- a server to fetch from: public in name and address, on loopback in fact -----------------


Reply = Callable[[str], bytes]


@asynccontextmanager
async def web(
    reply: Reply, answers: dict[str, list[list[str]]] | None = None
) -> AsyncIterator[tuple[Callable[..., ImageFetcher], list[str], list[str]]]:
    """Yields a maker of fetchers, and the lists of connected addresses and requests."""
    connected: list[str] = []
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(head)
        writer.write(reply(head))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = {host: list(turns) for host, turns in (answers or {}).items()}

    async def resolve(host: str, _: int) -> list[str]:
        turns = script.get(host, [["93.184.216.34"]])
        return turns.pop(0) if len(turns) > 1 else turns[0]

    async def connect(address: Address, target: Target):  # type: ignore[no-untyped-def]
        connected.append(str(address))
        return await asyncio.open_connection("127.0.0.1", port, limit=32 * 1024)

    def make(limits: FetchLimits | None = None) -> ImageFetcher:
        return ImageFetcher(OPEN, limits, resolve=resolve, connect=connect)

    try:
        yield make, connected, requests
    finally:
        server.close()


def ok(body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


async def test_an_image_is_fetched_and_put_in_place_in_all_three_apis() -> None:
    url = "http://pics.example.com/a.png"
    body = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url},
        "messages": {"type": "image", "source": {"type": "url", "url": url}},
        "text": f"the address {url} in a text stays",
    }
    async with web(lambda head: ok(PNG)) as (make, connected, requests):
        fetcher = make()
        data = json.loads(await fetcher.inline(json.dumps(body).encode(), [url, url], WHO))
        encoded = base64.b64encode(PNG).decode()
        assert data["chat"]["image_url"]["url"] == f"data:image/png;base64,{encoded}"
        assert data["responses"]["image_url"] == f"data:image/png;base64,{encoded}"
        assert data["messages"]["source"] == {
            "type": "base64",
            "media_type": "image/png",
            "data": encoded,
        }
        assert data["text"] == body["text"]
        assert len(connected) == 1  # one address, one fetch
        assert "authorization" not in requests[0].lower()
        assert "cookie" not in requests[0].lower()
        assert fetcher.num_active == 0


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/",
        "http://2130706433/",
        "//localhost/",
        "http://pics.example.com:8080/",
        "file:///etc/passwd",
        "http://user@pics.example.com/",
    ],
)
async def test_ur_75_a_redirect_starts_the_checks_over(location: str) -> None:
    async with web(lambda head: redirect(location)) as (make, connected, _):
        with pytest.raises(Failure):
            await make().fetch("http://pics.example.com/")
        assert connected == ["93.184.216.34"]


async def test_redirects_end() -> None:
    async with web(lambda head: redirect("/again")) as (make, connected, _):
        with pytest.raises(Failure) as caught:
            await make().fetch("http://pics.example.com/")
        assert caught.value.reason is Reason.IMAGE_FETCH
        assert len(connected) == 6


async def test_s_04_a_name_that_changes_its_answer_gains_nothing() -> None:
    turns = {"evil.example.com": [["93.184.216.34"], ["127.0.0.1"]]}
    async with web(lambda head: redirect("/two"), turns) as (make, connected, _):
        with pytest.raises(Failure):
            await make().fetch("http://evil.example.com/")
        assert connected == ["93.184.216.34"]  # the second answer was checked, not used


async def test_refused_unreachable_and_not_an_image_read_the_same() -> None:
    texts = set()
    replies: list[Reply] = [
        lambda head: ok(b"<html>"),
        lambda head: ok(b""),
        lambda head: b"HTTP/1.1 404 Not Found\r\n\r\n",
        lambda head: b"nonsense\r\n\r\n",
        lambda head: ok(PNG)[:-3],
        lambda head: ok(PNG, "content-encoding: gzip\r\n"),
        lambda head: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ]
    for reply in replies:
        async with web(reply) as (make, _, _):
            with pytest.raises(Failure) as caught:
                await make().fetch("http://pics.example.com/")
            texts.add((caught.value.reason, caught.value.message))
    inside = {"in.example.com": [["10.0.0.1"]]}
    async with web(lambda head: ok(PNG), inside) as (make, connected, _):
        with pytest.raises(Failure) as caught:
            await make().fetch("http://in.example.com/")
        texts.add((caught.value.reason, caught.value.message))
        assert connected == []
    assert len(texts) == 1


async def test_sizes_are_bounded_declared_or_not() -> None:
    limits = FetchLimits(max_image_bytes=100, max_total_bytes=150)
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    big = PNG + b"x" * 200
    replies: list[Reply] = [
        lambda head: ok(big),
        lambda head: b"HTTP/1.1 200 OK\r\n\r\n" + big,
        lambda head: chunked + b"%x\r\n" % len(big) + big + b"\r\n0\r\n\r\n",
    ]
    for reply in replies:
        async with web(reply) as (make, _, _):
            with pytest.raises(Failure):
                await make(limits).fetch("http://pics.example.com/")
    small = PNG + b"y" * 70
    async with web(lambda head: ok(small)) as (make, _, _):
        fetcher = make(limits)
        assert await fetcher.fetch("http://pics.example.com/") == small
        urls = [f"http://pics.example.com/{i}" for i in range(2)]
        with pytest.raises(Failure):
            await fetcher.inline(b"{}", urls, WHO)
    good = chunked + b"%x\r\n" % len(PNG) + PNG + b"\r\n0\r\n\r\n"
    async with web(lambda head: good) as (make, _, _):
        assert await make(limits).fetch("http://pics.example.com/") == PNG


async def test_time_is_bounded() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    limits = FetchLimits(connect_timeout_s=0.05)
    fetcher = ImageFetcher(OPEN, limits, resolve=never)
    with pytest.raises(Failure) as caught:
        await fetcher.inline(b"{}", ["http://pics.example.com/"], WHO)
    assert caught.value.reason is Reason.IMAGE_FETCH
    assert fetcher.num_active == 0


Connect = Callable[[Address, Target], Awaitable[object]]
