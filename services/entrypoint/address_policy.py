"""Which image addresses may be fetched. Pure: no resolver, no socket.

Allow lists, not deny lists, wherever one is possible: a host name of public shape or a canonical
address; of IPv6 only what is global unicast. Spellings that a resolver might read as an address
(hexadecimal, octal, short, decimal) are refused as spellings, so that nothing here depends on how
some C library reads them.
Source: reliability-and-security.md, S-04; UR-74, UR-75.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.common.errors import Failure, Reason

MAX_URL_BYTES: Final = 8192
REFUSAL_TEXT: Final = "an image address could not be used"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_URL: Final = re.compile(r"(?i)(https?)://([^/?#]*)([/?][^#]*)?(#.*)?")
_VISIBLE: Final = re.compile(r"[!-\[\]-~]*")  # printable ASCII without blank and backslash
_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMERIC: Final = re.compile(r"(?i)[0-9]+|0x[0-9a-f]*")
_PORTS: Final = {"https": 443, "http": 80}
# Names that mean a machine or a network of ours, whatever a resolver says.
_PRIVATE_SUFFIXES: Final = (
    *("localhost", "local", "internal", "intranet", "private", "corp", "home", "lan"),
    *("home.arpa", "localdomain", "onion", "test", "example", "invalid", "in-addr.arpa"),
)
_DENIED_V4: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
        *("192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    )
)
_GLOBAL_V6: Final = ipaddress.ip_network("2000::/3")
# Inside global unicast, but documentation, benchmarks, or IPv4 in disguise (Teredo, 6to4).
_DENIED_V6: Final = tuple(
    ipaddress.ip_network(text)
    for text in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)


@dataclass(frozen=True)
class Target:
    """A checked address: what to resolve, and what to ask for."""

    scheme: str
    host: str
    port: int
    path: str
    literal: Address | None  # set when the host is an address, already allowed


@dataclass(frozen=True)
class UrlPolicy:
    """What the operator allows.

    Args:
        domains: if not empty, only these hosts and their subdomains.
        denied_networks: the deployment's own ranges, beside everything that is not public.
    """

    allow_http: bool = False
    domains: Sequence[str] = ()
    denied_networks: Sequence[Network] = ()


def check_url(url: str, policy: UrlPolicy, *, came_from: Target | None = None) -> Target:
    """Returns where an address leads, or raises Failure(IMAGE_BLOCKED).

    Args:
        came_from: set for a redirect: no downgrade and no change of port is allowed.
    """
    if len(url.encode()) > MAX_URL_BYTES or not _VISIBLE.fullmatch(url):
        raise refused()
    match = _URL.fullmatch(url)
    if match is None:
        raise refused()
    scheme = match[1].lower()
    if scheme == "http" and not policy.allow_http:
        raise refused()
    host, port = _split_authority(match[2], scheme)
    if came_from is not None and scheme != came_from.scheme and scheme == "http":
        raise refused()
    if came_from is not None and scheme == came_from.scheme and port != came_from.port:
        raise refused()
    path = match[3] or "/"
    path = path if path.startswith("/") else "/" + path
    literal = _literal(host)
    if literal is not None:
        if policy.domains or not is_allowed(literal, policy.denied_networks):
            raise refused()
    else:
        _check_name(host, policy.domains)
    return Target(scheme, host, port, path, literal)


def check_answers(answers: Iterable[str], policy: UrlPolicy) -> list[Address]:
    """Returns a name's addresses if every one of them is allowed.

    One bad answer spoils all: a name that also points inside is an attack, not an accident.
    Raises: Failure(IMAGE_FETCH), the same as for a host that does not answer.
    """
    addresses = [ipaddress.ip_address(answer.partition("%")[0]) for answer in answers]
    if not addresses or not all(is_allowed(a, policy.denied_networks) for a in addresses):
        raise unreachable()
    return addresses


def is_allowed(address: Address, denied_networks: Iterable[Network] = ()) -> bool:
    """Returns whether an address is public unicast and not denied."""
    if isinstance(address, ipaddress.IPv6Address):
        # Mapped, NAT64, unique-local, link-local, multicast, ... are all outside of 2000::/3.
        if address not in _GLOBAL_V6 or any(address in network for network in _DENIED_V6):
            return False
    elif any(address in network for network in _DENIED_V4):
        return False
    return not any(
        address in network for network in denied_networks if network.version == address.version
    )


def refused() -> Failure:
    """Returns the failure of an address that may not be fetched, whatever the reason."""
    return Failure(Reason.IMAGE_BLOCKED, REFUSAL_TEXT)


def unreachable() -> Failure:
    """Returns the failure of everything that depends on the outside: one text for all."""
    return Failure(Reason.IMAGE_FETCH, REFUSAL_TEXT)


def _split_authority(authority: str, scheme: str) -> tuple[str, int]:
    if "@" in authority or "%" in authority:
        raise refused()
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise refused()
        port = rest[1:]
        host = f"[{host}]"
    else:
        host, _, port = authority.partition(":")
    if port and port != str(_PORTS[scheme]):
        raise refused()
    return host.lower(), _PORTS[scheme]


def _literal(host: str) -> Address | None:
    """Returns the address that a host spells, None for a name; refuses odd spellings."""
    if host.startswith("["):
        try:
            return ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise refused() from None
    if _NUMERIC.fullmatch(host.rpartition(".")[2]):
        try:
            return ipaddress.IPv4Address(host)  # strict: four decimal parts, no leading zeros
        except ValueError:
            raise refused() from None
    return None


def _check_name(host: str, domains: Sequence[str]) -> None:
    labels = host.split(".")
    if len(host) > 253 or len(labels) < 2 or not all(_LABEL.fullmatch(x) for x in labels):
        raise refused()  # also the trailing dot, which makes an empty label
    if any(host == suffix or host.endswith(f".{suffix}") for suffix in _PRIVATE_SUFFIXES):
        raise refused()
    if domains and not any(
        host == domain.lower() or host.endswith(f".{domain.lower()}") for domain in domains
    ):
        raise refused()
