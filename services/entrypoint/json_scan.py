r"""Checks a JSON body while it arrives, and makes a small skeleton of it.

A body may be 96 MiB. Parsing it at once would hold the interpreter for a quarter of a second and
freeze every other stream (UR-50), so each piece is scanned as the connection delivers it, in about
0.3 ms per 64 KiB, and a body that breaks a limit is refused at its first bad piece, not at its end.

Checked: UTF-8, lone surrogate escapes, depth, length of numbers, keys per object, number of values,
NaN and Infinity. A body that is no JSON for any other reason passes: the codec says so in its own
words. Duplicate keys are allowed, the last value counts, as in the codec.

The skeleton is the same document with each string over 8 KiB replaced by a short one that carries
its length, so that the content checks (`body_checks.py`) never parse megabytes.
Source: reliability-and-security.md, section 3; S-07.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from services.common.errors import Failure, Reason
from services.entrypoint.limits import Limits

MAX_KEPT_STRING_BYTES: Final = 8192
# A replaced string reads as this many characters and then its true length in bytes.
LONG_STRING_MARK: Final = "\u0001" * 1024

# Possessive quantifiers: no backtracking, linear time on any input.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRING_REST: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|[^u])", re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_BAD_WORD: Final = re.compile(rb"NaN|Infinity")
_WORD_TAIL: Final = re.compile(rb"[-+.0-9a-zA-Z]++\Z")
_STRUCTURE: Final = b"{}[]:,"
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(_STRUCTURE))
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST, _COLON = b"{}[]:"
_MAX_ESCAPE_BYTES: Final = 12  # a surrogate pair: \ud83d\ude00


class JsonScanner:
    """Scans one body piece by piece: `feed` each, then `finish`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._long_number = re.compile(
            rb"[-+.0-9eE]{%d}" % (limits.max_json_number_chars + 1)
        ).search
        self._in_string = False
        self._string_carry = b""  # of an open string: what may be half an escape
        self._word_carry = b""  # outside of strings: what may be half a number or word
        self._pending: list[bytes] = []  # of an open string, while it may still be short
        self._pending_bytes = 0
        self._open: list[int] = []  # keys so far of each open object, -1 for a list
        self._num_values = 1
        self._skeleton: list[bytes] = []
        self.num_bytes = 0

    def feed(self, piece: bytes) -> None:
        """Takes the next piece. Raises Failure(INVALID_REQUEST) once a limit is broken."""
        self.num_bytes += len(piece)
        try:
            self._utf8.decode(piece)
        except UnicodeDecodeError:
            raise _refused("the request body is not valid UTF-8") from None
        self._scan(self._string_carry + piece, last=False)

    def finish(self) -> bytes:
        """Returns the skeleton, after the checks of the last bytes."""
        try:
            self._utf8.decode(b"", final=True)
        except UnicodeDecodeError:
            raise _refused("the request body is not valid UTF-8") from None
        self._scan(self._string_carry, last=True)
        return b"".join(self._skeleton)

    def _scan(self, data: bytes, *, last: bool) -> None:
        self._string_carry = b""
        if self._in_string:
            end = _rest_of_string(data)
            if data[end : end + 1] != b'"':
                self._keep_open_string(data, last)
                return
            self._close_string(data[: end + 1])
            data = data[end + 1 :]
        outside = _STRING.sub(b"", data)
        quote = outside.find(b'"')  # all complete strings are gone: it opens the unfinished one
        head = data if quote < 0 else data[: len(data) - (len(outside) - quote)]
        _check_surrogates(head)
        self._skeleton.append(
            head if len(head) <= MAX_KEPT_STRING_BYTES else _STRING.sub(_shorten_match, head)
        )
        self._check_structure(outside if quote < 0 else outside[:quote])
        if quote >= 0:
            self._in_string, self._word_carry = True, b""
            self._pending, self._pending_bytes = [b'"'], 1
            self._keep_open_string(outside[quote + 1 :], last)

    def _keep_open_string(self, data: bytes, last: bool) -> None:
        """Stores the part of an unfinished string that is certain; the rest waits."""
        cut = len(data) if last else _safe_cut(data)
        text, self._string_carry = data[:cut], data[cut:]
        if not last:
            _check_surrogates(text)
        if self._pending_bytes <= MAX_KEPT_STRING_BYTES:
            self._pending.append(text)
        self._pending_bytes += len(text)
        if last:
            self._skeleton.extend(self._pending)  # unfinished: the codec will refuse it

    def _close_string(self, data: bytes) -> None:
        _check_surrogates(data)
        self._in_string = False
        self._pending_bytes += len(data)
        if self._pending_bytes > MAX_KEPT_STRING_BYTES:
            self._skeleton.append(_mark(self._pending_bytes))
        else:
            self._skeleton += [*self._pending, data]
        self._pending = []

    def _check_structure(self, outside: bytes) -> None:
        words = self._word_carry + outside
        tail = _WORD_TAIL.search(words)
        self._word_carry = tail[0][-self._limits.max_json_number_chars - 1 :] if tail else b""
        if self._long_number(words):
            limit = self._limits.max_json_number_chars
            raise _refused(f"a number is longer than {limit} characters", max_chars=limit)
        if _BAD_WORD.search(words):
            raise _refused("NaN and Infinity are not JSON numbers")
        marks = outside.translate(None, _NOT_STRUCTURE)
        self._num_values += marks.count(b",") + marks.count(b":")
        if self._num_values > self._limits.max_json_values:
            limit = self._limits.max_json_values
            raise _refused(f"the body has more than {limit} values", max_values=limit)
        stack, max_depth, max_keys = (
            self._open,
            self._limits.max_json_depth,
            self._limits.max_json_keys,
        )
        for mark in marks.replace(b",", b""):
            if mark == _COLON:
                if stack and stack[-1] >= 0:
                    stack[-1] += 1
                    if stack[-1] > max_keys:
                        raise _refused(
                            f"an object has more than {max_keys} keys", max_keys=max_keys
                        )
            elif mark in (_OPEN_OBJECT, _OPEN_LIST):
                stack.append(0 if mark == _OPEN_OBJECT else -1)
                if len(stack) > max_depth:
                    raise _refused(
                        f"the body is nested deeper than {max_depth} levels", max_depth=max_depth
                    )
            elif stack:
                stack.pop()


def _rest_of_string(data: bytes) -> int:
    """Returns the place of the closing quote, or of the last half escape, or the length."""
    match = _STRING_REST.match(data)
    return match.end() if match else 0


def _safe_cut(data: bytes) -> int:
    """Returns where the certain part of an unfinished string ends.

    An escape that is not complete, and a high surrogate that waits for its low half, stay behind.
    """
    window = max(0, len(data) - _MAX_ESCAPE_BYTES)
    # Step back over a run of backslashes, so that counting starts at an escape's own backslash.
    while window > 0 and data[window - 1 : window] == b"\\":
        window -= 1
    while (slash := data.find(b"\\", window)) >= 0:
        match = _ESCAPE.match(data, slash)
        if match is None:
            return slash if len(data) - slash < 6 else len(data)
        if _is_high(match[1]) and len(data) - slash < _MAX_ESCAPE_BYTES:
            return slash
        window = match.end()
    return len(data)


def _is_high(code: bytes | None) -> bool:
    return code is not None and 0xD800 <= int(code, 16) < 0xDC00


def _check_surrogates(text: bytes) -> None:
    """Raises when a surrogate escape has no partner. `text` starts outside of an escape."""
    if not _SURROGATE.search(text):
        return
    pair_at = -1  # where the low half of the last high surrogate must start
    for match in _ESCAPE.finditer(text):
        is_low = match[1] is not None and 0xDC00 <= int(match[1], 16) < 0xE000
        if is_low != (pair_at == match.start()) or (pair_at >= 0 and not is_low):
            raise _refused("the body has a lone surrogate escape")
        pair_at = match.end() if _is_high(match[1]) else -1
    if pair_at >= 0:
        raise _refused("the body has a lone surrogate escape")


def _shorten_match(match: re.Match[bytes]) -> bytes:
    length = match.end() - match.start()
    return match[0] if length <= MAX_KEPT_STRING_BYTES else _mark(length)


def _mark(num_bytes: int) -> bytes:
    return b'"' + b"\\u0001" * len(LONG_STRING_MARK) + b'%d"' % num_bytes


def _refused(message: str, **numbers: int) -> Failure:
    return Failure(
        Reason.INVALID_REQUEST, message, {name: str(value) for name, value in numbers.items()}
    )
