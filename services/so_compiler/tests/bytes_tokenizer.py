"""A tokenizer of bytes, an end token and the token inside tool tags: no model needed."""

from __future__ import annotations

import random

import llguidance

EOS_ID = 256
DSML_ID = 257
VOCAB_SIZE = 258


class _Bytes:
    eos_token_id = EOS_ID
    bos_token_id = EOS_ID
    tokens = [*(bytes([i]) for i in range(256)), b"<eos>", b"<dsml>"]
    special_token_ids = [EOS_ID, DSML_ID]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=VOCAB_SIZE)


def accepts(grammar: bytes, ids: list[int]) -> bool:
    """Whether the whole sequence, ended there, is in the language."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar.decode(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def sample(grammar: bytes, rng: random.Random, max_tokens: int = 400) -> list[int] | None:
    """A random sequence of the language; None when none ended in time.

    Ends as soon as it may with some probability, and prefers what closes structures: otherwise
    strings would go on for ever.
    """
    matcher = llguidance.LLMatcher(TOKENIZER, grammar.decode(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while len(ids) < max_tokens:
        allowed = _allowed(matcher)
        if EOS_ID in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return ids
        choices = [i for i in allowed if i != EOS_ID]
        if not choices:
            return ids if EOS_ID in allowed else None
        closing = [i for i in choices if i in b'"}],:' or i == DSML_ID]
        plain = [i for i in choices if 97 <= i <= 102 or 48 <= i <= 57]
        pool = closing if closing and rng.random() < 0.6 else plain or choices
        chosen = rng.choice(pool)
        assert matcher.consume_token(chosen), matcher.get_error()
        ids.append(chosen)
    return None


def _allowed(matcher: llguidance.LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()
    return [i for i in range(VOCAB_SIZE) if mask[i // 8] >> (i % 8) & 1]
