"""Shares of a key: requests in flight, requests and tokens per minute. Pure: time is an argument.

A key's limit is divided by the number of live entrypoints (docs/adr: quota across entrypoints), so
that no limit is exceeded however requests are spread, and none needs a call on the critical path.
Checks reserve in the same step (UR-62): there is nothing between looking and taking.
Source: reliability-and-security.md, P-13, P-14, S-14.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.errors import Failure, Reason
from services.entrypoint.auth import Identity, KeyLimits

_WINDOW_S = 60.0


@dataclass
class Bucket:
    """A token bucket that fills evenly and holds one window's worth."""

    level: float
    updated_s: float

    def refill(self, per_minute: float, now_s: float) -> None:
        """Adds what has come in since the last call."""
        added = max(0.0, now_s - self.updated_s) * per_minute / _WINDOW_S
        self.level = min(per_minute, self.level + added)
        self.updated_s = now_s

    def wait_s(self, amount: float, per_minute: float) -> float:
        """Returns how long until `amount` is there."""
        return max(0.0, (amount - self.level) * _WINDOW_S / per_minute)


@dataclass
class _Account:
    limits: KeyLimits
    num_in_flight: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass
class Grant:
    """What one request holds of its key's shares; `Quota.settle` gives it back."""

    key_id: str
    num_tokens: int = 0
    settled: bool = field(default=False)


class Quota:
    """The accounts of all keys seen by this entrypoint."""

    def __init__(self, max_concurrent_per_key: int, max_accounts: int = 100_000) -> None:
        self._default_concurrent = max_concurrent_per_key
        self._max_accounts = max_accounts
        self._accounts: dict[str, _Account] = {}
        self._num_entrypoints = 1

    def set_num_entrypoints(self, num: int) -> None:
        """Sets how many entrypoints share every limit."""
        self._num_entrypoints = max(1, num)

    @property
    def num_in_flight(self) -> int:
        """Returns the requests in flight over all keys; a row of the census."""
        return sum(account.num_in_flight for account in self._accounts.values())

    def has_place(self, identity: Identity, now_s: float) -> bool:
        """Returns whether the key may have one more request in flight."""
        account = self._account(identity, now_s)
        return account.num_in_flight < self._concurrent(identity)

    def begin(self, identity: Identity, now_s: float) -> Grant:
        """Takes one request's place, or raises Failure(QUOTA) with the time to wait."""
        account = self._account(identity, now_s)
        limits = identity.limits
        concurrent = self._concurrent(identity)
        if account.num_in_flight >= concurrent:
            raise Failure(
                Reason.QUOTA,
                f"this key has {account.num_in_flight} requests in flight, "
                f"its share here is {concurrent}",
                {
                    "num_in_flight": str(account.num_in_flight),
                    "max_in_flight": str(concurrent),
                },
                retry_after_s=1.0,
            )
        if account.requests is not None:
            per_minute = limits.requests_per_minute / self._num_entrypoints
            _demand(account.requests, 1.0, per_minute, now_s, "requests")
        # A key in debt is refused before anything is parsed; the exact amount is taken later.
        if account.tokens is not None:
            per_minute = limits.tokens_per_minute / self._num_entrypoints
            _demand(account.tokens, 1.0, per_minute, now_s, "tokens")
        if account.requests is not None:
            account.requests.level -= 1.0
        account.num_in_flight += 1
        return Grant(identity.key_id)

    def reserve_tokens(
        self, grant: Grant, identity: Identity, num_tokens: int, now_s: float
    ) -> None:
        """Takes prompt and output budget, or raises Failure(QUOTA)."""
        account = self._account(identity, now_s)
        if account.tokens is None:
            return
        per_minute = identity.limits.tokens_per_minute / self._num_entrypoints
        _demand(account.tokens, float(num_tokens), per_minute, now_s, "tokens")
        account.tokens.level -= num_tokens
        grant.num_tokens = num_tokens

    def settle(self, grant: Grant, num_used_tokens: int | None = None) -> None:
        """Ends a grant: the place is free, tokens that were not used come back. Idempotent.

        Args:
            num_used_tokens: None when nothing ran, which returns all of them.
        """
        if grant.settled:
            return
        grant.settled = True
        account = self._accounts.get(grant.key_id)
        if account is None:
            return
        account.num_in_flight -= 1
        if account.tokens is not None:
            account.tokens.level += max(0, grant.num_tokens - (num_used_tokens or 0))

    def _concurrent(self, identity: Identity) -> int:
        limit = identity.limits.max_concurrent or self._default_concurrent
        return max(1, limit // self._num_entrypoints)

    def _account(self, identity: Identity, now_s: float) -> _Account:
        account = self._accounts.get(identity.key_id)
        if account is None or account.limits != identity.limits:
            in_flight = account.num_in_flight if account else 0
            self._make_room()
            account = _Account(
                identity.limits,
                in_flight,
                self._new_bucket(identity.limits.requests_per_minute, now_s),
                self._new_bucket(identity.limits.tokens_per_minute, now_s),
            )
            self._accounts[identity.key_id] = account
        return account

    def _new_bucket(self, per_minute: int, now_s: float) -> Bucket | None:
        return Bucket(per_minute / self._num_entrypoints, now_s) if per_minute else None

    def _make_room(self) -> None:
        if len(self._accounts) < self._max_accounts:
            return
        idle = next((k for k, a in self._accounts.items() if a.num_in_flight == 0), None)
        if idle is not None:
            del self._accounts[idle]


def _demand(bucket: Bucket, amount: float, per_minute: float, now_s: float, what: str) -> None:
    bucket.refill(per_minute, now_s)
    if bucket.level >= amount:
        return
    if amount > per_minute:
        raise Failure(
            Reason.QUOTA,
            f"the request counts {amount:.0f} {what}, this key's share here is "
            f"{per_minute:.0f} per minute",
            {f"num_{what}": f"{amount:.0f}", f"max_{what}_per_minute": f"{per_minute:.0f}"},
            retry_after_s=30.0,
        )
    raise Failure(
        Reason.QUOTA,
        f"this key's {what} per minute are used up",
        {f"max_{what}_per_minute": f"{per_minute:.0f}"},
        retry_after_s=bucket.wait_s(amount, per_minute),
    )
