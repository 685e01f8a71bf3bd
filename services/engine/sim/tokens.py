"""Which token the simulated model says next: a function of the sequence alone.

Whoever asks - prefill, decode, another engine after a move, a second attempt after a crash - gets
the same continuation for (seed, absolute position, ids before it).
Source: engine.md, sections 1.10 and 9.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.engine.requests import Sampling, TokenOut
from services.engine.sim.config import SimConfig, SpecialIds

MIN_LOGPROB = -9999.0


class Cursor:
    """Where a sequence stands: running hash of its ids, position, and place in the answer.

    `index` counts output tokens; `phase_index` those since the thought or the answer began.
    """

    __slots__ = ("hasher", "ids", "index", "phase_index", "position", "thinking")

    def __init__(self, ids: SpecialIds, prompt: array[int], output: Sequence[int]) -> None:
        self.ids = ids
        self.hasher = hashlib.blake2b(prompt.tobytes(), digest_size=16)
        self.position = len(prompt)
        self.index = 0
        self.phase_index = 0
        self.thinking = _starts_thinking(prompt, ids)
        for token_id in output:
            self.advance(token_id)

    def advance(self, token_id: int) -> None:
        """Takes one more token as said."""
        self.hasher.update(token_id.to_bytes(4, "little"))
        self.position += 1
        self.index += 1
        self.phase_index += 1
        if token_id == self.ids.think_end and self.thinking:
            self.thinking, self.phase_index = False, 0

    def copy(self) -> Cursor:
        other = Cursor.__new__(Cursor)
        other.ids, other.hasher = self.ids, self.hasher.copy()
        other.position, other.index = self.position, self.index
        other.phase_index, other.thinking = self.phase_index, self.thinking
        return other

    def noise(self, seed: int, stream: int) -> int:
        """128 bits that depend on (seed, position, ids so far) and on what they are used for."""
        key = seed.to_bytes(8, "little") + self.position.to_bytes(8, "little") + bytes([stream])
        return int.from_bytes(
            hashlib.blake2b(self.hasher.digest(), key=key, digest_size=16).digest(), "little"
        )


def _starts_thinking(prompt: array[int], ids: SpecialIds) -> bool:
    for token_id in reversed(prompt[-64:]):
        if token_id == ids.think_start:
            return True
        if token_id in (ids.think_end, ids.assistant):
            return False
    return False


class Voice(Protocol):
    """What the model wants to say; the cursor says where it stands."""

    def say(self, cursor: Cursor) -> TokenOut: ...


@dataclass(frozen=True)
class HashVoice:
    """Pseudo-random words, ended by chance or by the caller's limit."""

    config: SimConfig
    sampling: Sampling

    def say(self, cursor: Cursor) -> TokenOut:
        noise = cursor.noise(0 if self.sampling.greedy else self.sampling.seed, 0)
        ids = self.config.ids
        token_id = 3 + noise % (min(ids.num_plain, self.config.vocab_size) - 3)
        if cursor.thinking and cursor.phase_index >= self.config.think_tokens:
            token_id = ids.think_end
        elif (
            self.config.stop_every
            and not cursor.thinking
            and cursor.phase_index > 0
            and (noise >> 64) % self.config.stop_every == 0
        ):
            token_id = ids.end
        return with_logprobs(token_id, noise, self.sampling, self.config)


@dataclass(frozen=True)
class EchoVoice:
    """Answers with the text of the last user message, after a short thought if one is asked for."""

    config: SimConfig
    sampling: Sampling
    words: array[int]

    def say(self, cursor: Cursor) -> TokenOut:
        ids, at = self.config.ids, cursor.phase_index
        if cursor.thinking:
            thought = self.words[: self.config.think_tokens]
            token_id = thought[at] if at < len(thought) else ids.think_end
        else:
            token_id = self.words[at] if at < len(self.words) else ids.end
        return with_logprobs(token_id, cursor.noise(0, 0), self.sampling, self.config)


def last_user_words(prompt: array[int], ids: SpecialIds) -> array[int]:
    """Ids between the last user token and the assistant token after it, special ones left out.

    A prompt without those tokens (raw token API) is echoed whole.
    """
    end = _rfind(prompt, ids.assistant, len(prompt))
    end = len(prompt) if end < 0 else end
    start = _rfind(prompt, ids.user, end)
    words = prompt[start + 1 : end]
    return array("I", [i for i in words if 2 < i < ids.num_plain])


def _rfind(values: array[int], wanted: int, before: int) -> int:
    for index in range(before - 1, -1, -1):
        if values[index] == wanted:
            return index
    return -1


@dataclass(frozen=True)
class Script:
    """What to play back. Reasoning comes first and is closed; `end` follows unless told not to."""

    token_ids: tuple[int, ...]
    reasoning_token_ids: tuple[int, ...] = ()
    tool_call_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    end: bool = True

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Script:
        """Raises: ValueError for an unknown key or a value of the wrong type."""
        known = set(cls.__dataclass_fields__)
        if unknown := set(document) - known:
            raise ValueError(f"unknown keys in a script: {sorted(unknown)}")

        def ints(name: str) -> tuple[int, ...]:
            return tuple(int(i) for i in document.get(name, ()))

        return cls(
            ints("token_ids"),
            ints("reasoning_token_ids"),
            ints("tool_call_token_ids"),
            tuple(float(x) for x in document.get("logprobs", ())),
            tuple(tuple((int(i), float(p)) for i, p in row) for row in document.get("top", ())),
            bool(document.get("end", True)),
        )

    def sequence(self, ids: SpecialIds, thinking: bool) -> list[int]:
        said = list(self.reasoning_token_ids)
        if thinking:
            said.append(ids.think_end)
        return said + list(self.token_ids) + list(self.tool_call_token_ids)


@dataclass(frozen=True)
class ScriptVoice:
    config: SimConfig
    sampling: Sampling
    script: Script
    said: tuple[int, ...]

    def say(self, cursor: Cursor) -> TokenOut:
        at, script = cursor.index, self.script
        if at >= len(self.said):
            # A script without an end goes on until the caller's limit.
            token_id = self.config.ids.end if script.end else self.said[-1]
            return with_logprobs(token_id, cursor.noise(0, 0), self.sampling, self.config)
        token = with_logprobs(self.said[at], cursor.noise(0, 0), self.sampling, self.config)
        if not self.sampling.logprobs:
            return token
        logprob = script.logprobs[at] if at < len(script.logprobs) else token.logprob
        top = script.top[at] if at < len(script.top) else token.top
        return TokenOut(token.token_id, logprob, top[: self.sampling.top_logprobs])


@dataclass
class Scripts:
    """Finds the script of a request: by request id, by digest of the prompt, then `default`.

    A folder holds `<name>.json`; scripts registered in memory come first.
    """

    folder: str = ""
    registered: dict[str, Script] = field(default_factory=dict)

    def find(self, request_id: str, prompt: array[int]) -> Script | None:
        for name in (request_id, prompt_digest(prompt), "default"):
            if name in self.registered:
                return self.registered[name]
            if self.folder and "/" not in name and not name.startswith("."):
                path = Path(self.folder) / f"{name}.json"
                if path.is_file():
                    return Script.from_document(json.loads(path.read_text(encoding="utf-8")))
        return None


def prompt_digest(prompt: array[int]) -> str:
    """Name of a prompt's script: 16 hex digits over its ids as u32 little-endian bytes."""
    return hashlib.sha256(prompt.tobytes()).hexdigest()[:16]


def voice_for(
    config: SimConfig, scripts: Scripts, request_id: str, prompt: array[int], sampling: Sampling
) -> Voice:
    """The voice of a request; a scripted engine without a script for it echoes."""
    if config.mode == "hash":
        return HashVoice(config, sampling)
    if config.mode == "scripted":
        script = scripts.find(request_id, prompt)
        if script is not None:
            said = tuple(script.sequence(config.ids, _starts_thinking(prompt, config.ids)))
            if not said and not script.end:
                raise ValueError("a script without tokens must end")
            return ScriptVoice(config, sampling, script, said)
    return EchoVoice(config, sampling, last_user_words(prompt, config.ids))


def with_logprobs(token_id: int, noise: int, sampling: Sampling, config: SimConfig) -> TokenOut:
    """Adds log-probabilities that fall with the rank, the chosen token first."""
    if not sampling.logprobs:
        return TokenOut(token_id)
    chosen = -(1 + (noise >> 32) % 499) / 1000  # above -0.5: more likely than the rest together
    rest = math.log1p(-math.exp(chosen))
    top = [(token_id, chosen)]
    for rank in range(1, sampling.top_logprobs):
        other = (token_id + rank * 7919) % config.vocab_size
        top.append((other, max(MIN_LOGPROB, rest - rank * math.log(2))))
    return TokenOut(token_id, chosen, tuple(top[: sampling.top_logprobs]))


def restrict(token: TokenOut, mask: bytes, noise: int, closers: Sequence[int] = ()) -> TokenOut:
    """The token if the mask allows it, else a closer, else one of the allowed by the noise.

    Closers keep what is said under a grammar short: open strings, lists and objects end.

    `mask` is 32-bit words, little-endian, bit t of the vocabulary set when allowed (5.4).
    Raises: ValueError when nothing is allowed.
    """
    at = token.token_id
    if at >> 3 < len(mask) and mask[at >> 3] >> (at & 7) & 1:
        return token
    for closer in closers:
        if closer >> 3 < len(mask) and mask[closer >> 3] >> (closer & 7) & 1:
            return TokenOut(closer, token.logprob)
    bits = int.from_bytes(mask, "little")
    count = bits.bit_count()
    if count == 0:
        raise ValueError("the mask allows no token")
    wanted = noise % count
    for index, byte in enumerate(mask):
        here = byte.bit_count()
        if wanted < here:
            for bit in range(8):
                if byte >> bit & 1:
                    if wanted == 0:
                        return TokenOut(index * 8 + bit, token.logprob)
                    wanted -= 1
        wanted -= here
    raise AssertionError("unreachable: the bits were counted")
