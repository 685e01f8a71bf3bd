"""Telling our client's leaving from a peer that says "cancelled"."""

from __future__ import annotations

from services.common.errors import Failure, Reason


class ClientLeft(Failure):
    """The client of this request has gone, or does not read: there is nobody to answer."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.CLIENT_CANCELLED, message)


def as_ours(failure: Failure) -> Failure:
    """Returns a failure as the client should see it.

    A peer that reports a cancelled call was not cancelled by us, for that is an exception of its
    own here: its connection went away.
    """
    if failure.reason is Reason.CLIENT_CANCELLED and not isinstance(failure, ClientLeft):
        return Failure(Reason.BACKEND_LOST, "a peer ended the call", failure.metadata)
    return failure
