import asyncio
import json
import random

import llguidance
import pytest

from services.common.errors import Failure, Reason
from services.engine.grammar import (
    Constraint,
    GrammarLibrary,
    TriggerAutomaton,
    _tokenizer,
    one_bit,
)

VOCAB = 64
END = 0


class Alternating:
    """Allows 1, 2, 1, 2, ..., and the end after any 2."""

    def __init__(self):
        self.said = []

    def mask(self):
        wanted = 1 if len(self.said) % 2 == 0 else 2
        bits = int.from_bytes(one_bit(wanted, VOCAB), "little")
        if self.said and wanted == 1:
            bits |= 1 << END
        return bits.to_bytes(8, "little")

    def accept(self, token_id):
        allowed = self.mask()[token_id >> 3] >> (token_id & 7) & 1
        if allowed:
            self.said.append(token_id)
        return bool(allowed)

    def rollback(self, num):
        del self.said[-num:]


def allowed(mask):
    return None if mask is None else {i for i in range(VOCAB) if mask[i >> 3] >> (i & 7) & 1}


def make(**options):
    return Constraint(Alternating(), stop_ids=frozenset({END}), vocab_size=VOCAB, **options)


def test_an_exact_sequence_is_found_across_overlaps():
    automaton = TriggerAutomaton([1, 1, 2])
    progress = 0
    for token_id in (1, 1, 1, 2):
        progress = automaton.step(progress, token_id)
    assert progress == 3


def test_without_a_trigger_the_first_token_is_constrained():
    constraint = make()
    assert allowed(constraint.mask()) == {1}
    assert constraint.advance(1)
    assert allowed(constraint.mask()) == {2}
    assert not constraint.advance(5)
    assert constraint.dead
    assert constraint.mask() is None


def test_text_is_free_until_the_trigger_and_constrained_right_after_it():
    constraint = make(trigger=[9, 8])
    for token_id in (5, 9, 9, 7):
        assert constraint.mask() is None
        assert constraint.advance(token_id)
    constraint.advance(9)
    constraint.advance(8)
    assert allowed(constraint.mask()) == {1}


def test_the_bound_token_forces_the_trigger_token_by_token():
    constraint = make(trigger=[9, 8], bound_token_id=30)
    constraint.advance(30)
    assert allowed(constraint.mask()) == {9}
    constraint.advance(9)
    assert allowed(constraint.mask()) == {8}
    constraint.advance(8)
    assert allowed(constraint.mask()) == {1}


def test_ur_68_a_grammar_that_starts_inside_the_drafts_constrains_the_rows_after():
    constraint = make(trigger=[9])
    rows = constraint.masks([5, 9, 1, 2, 7])
    assert [allowed(row) for row in rows] == [None, None, {1}, {2}, {END, 1}]
    assert constraint.mask() is None  # nothing of it was committed
    for token_id in (5, 9, 1):
        assert constraint.advance(token_id)
    assert allowed(constraint.mask()) == {2}


def test_rows_after_a_forbidden_draft_need_no_mask():
    constraint = make()
    rows = constraint.masks([1, 5, 1])
    assert [allowed(row) for row in rows] == [{1}, {2}]


def test_after_the_end_anything_goes_and_can_be_taken_back():
    constraint = make()
    rows = constraint.masks([1, 2, END, 44, 45])
    assert [allowed(row) for row in rows][3:] == [None, None, None]
    assert allowed(constraint.mask()) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_t15_fill_accept_roll_back_fill_gives_the_same_bits(seed):
    rng = random.Random(seed)
    constraint = make(trigger=[3, 3], bound_token_id=rng.choice([0, 6]))
    for _ in range(60):
        before = constraint.mask()
        drafts = [rng.choice([1, 2, 3, 6, 7, END]) for _ in range(rng.randint(0, 7))]
        rows = constraint.masks(drafts)
        assert rows[0] == before == constraint.mask()
        choices = sorted(allowed(before) or {1, 2, 3, 7})
        assert constraint.advance(rng.choice(choices))


@pytest.fixture(scope="module")
def library():
    found = GrammarLibrary("tokenizer", 129280, end_id=1)
    assert found.available
    return found


def artifact(schema):
    # Without blanks: chance alone would say them for ever.
    strict = {"whitespace_flexible": False}
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=strict).encode()


@pytest.mark.parametrize("seed", range(30))
def test_t15_drafts_over_tokens_that_the_grammar_names_are_taken_back_whole(library, seed):
    grammar = 'start: (<[128825]> "ab" <[128825]> WORD)+\nWORD: /[c-f]+/'
    matcher = library.load("llguidance", "tokenizer", grammar.encode())()
    constraint = Constraint(matcher, stop_ids=frozenset({1}), vocab_size=129280)
    words = _tokenizer(library.path, 129280, 1)
    part = [128825, *words.tokenize_str("ab"), 128825, *words.tokenize_str("cdef")]
    rng, said = random.Random(seed), part * 6
    for at, token_id in enumerate(said):
        drafts = said[at : at + rng.randint(0, 7)]
        if drafts and rng.random() < 0.3:
            drafts[-1] = 42
        rows = constraint.masks(drafts)
        for row, following in zip(rows, said[at:], strict=False):
            assert row[following >> 3] >> (following & 7) & 1
        assert constraint.advance(token_id)


async def test_t16_random_allowed_tokens_with_drafts_on_always_parse(library):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22, 333]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    make_matcher = await asyncio.to_thread(
        library.load, "llguidance", "tokenizer", artifact(schema)
    )
    words = _tokenizer(library.path, 129280, 1)
    for seed in range(5):
        rng = random.Random(seed)
        constraint = Constraint(
            make_matcher(), stop_ids=frozenset({1}), vocab_size=library.vocab_size
        )
        said = []
        while len(said) < 200:
            mask = constraint.masks([rng.randrange(129280) for _ in range(5)])[0]
            choices = [i for i in range(129280) if mask[i >> 3] >> (i & 7) & 1]
            said.append(rng.choice(choices))
            assert constraint.advance(said[-1])
            if said[-1] == 1:
                break
        text = words.decode_str(said[:-1])
        document = json.loads(text)
        assert document["n"] in (1, 22, 333)
        assert isinstance(document["ok"], bool)


def test_what_does_not_belong_here_is_refused_with_its_reason(library):
    for backend, tokenizer_id, data, reason in (
        ("other", "tokenizer", b"", Reason.UNSUPPORTED_FEATURE),
        ("llguidance", "another", artifact({"type": "object"}), Reason.LAYOUT_MISMATCH),
        ("llguidance", "tokenizer", b"not a grammar", Reason.SCHEMA_UNSUPPORTED),
    ):
        with pytest.raises(Failure) as failure:
            library.load(backend, tokenizer_id, data)
        assert failure.value.reason is reason
