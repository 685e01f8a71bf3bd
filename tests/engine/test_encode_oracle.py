"""The codec's encoding against the `tokenizers` package, on text that no vector holds.

Lies here because the package comes with the engine extra; the codec's own tests compare with a slow
version made of the same regexes and merges.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from services.recipe import make_tokenizer
from services.recipe.codec import Tokenizer

NUM_TEXTS = 4_000
# Texts are drawn from one to three of these.
ALPHABETS = (
    "etaoin shrdlu",
    "The quick Brown FOX's it'll ",
    "0123456789٣४๓²½Ⅷ𝟘",
    "的一是了我不人在他有这・゠゛゜ー、。「」！？あいうアイウ々〇",
    "각난닭힣ᄀᄁᆨกำไ่้ضلاًَّकािี्",
    "e\u0301a\u0308\u0323o\u20dd\u0300\u200d\ufe0f\u0489",
    "👩\u200d🚀👨\u200d👩\u200d👧\U0001f3fd🇩🇪🏴\U000e0067\U000e007f☺\ufe0f",
    " \t\u00a0\u2003\u3000\u200b\u2028\u0085\x0b\x0c",
    "\n\r",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "¿¡«»“”–—…€£°±×÷√∞≠←↑→↓■□▲│",
    "\0\x01\x1b\x7f\x80\x9f\u00ad\ufeff\ufffd\ufffe\U0010ffff\ue000",
    "ßİıſŉǅΣςﬁＡａ９｜▁",
    "abcABC_019",
)


def texts() -> list[str]:
    rng = random.Random(7)
    found = []
    for _ in range(NUM_TEXTS):
        letters = "".join(rng.sample(ALPHABETS, rng.randint(1, 3)))
        text = ""
        while len(text) < rng.randint(1, 60):
            # Runs decide where pieces end; single characters decide what they start with.
            text += rng.choice(letters) * rng.choice((1, 1, 1, 1, 2, 3, 9))
        found.append(text)
    # What is in no alphabet: any code point beside any other.
    points = [chr(p) for p in range(0x110000) if not 0xD800 <= p <= 0xDFFF]
    found += ["".join(rng.choices(points, k=40)) for _ in range(200)]
    return found


@pytest.fixture(scope="module")
def path() -> Path:
    return make_tokenizer.build()["v4.1"]


def test_plain_text_has_the_ids_of_the_base_vocabulary(path: Path) -> None:
    document = json.loads(path.read_text("utf-8"))
    oracle = tokenizers.Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))
    ours = Tokenizer(path, num_threads=1, cache_bytes=0)
    for text in texts():
        ids = list(memoryview(ours.encode_plain(text)).cast("I"))
        assert ids == oracle.encode(text, add_special_tokens=False).ids, ascii(text)


def test_text_with_special_spellings_has_the_ids_of_the_full_vocabulary(path: Path) -> None:
    oracle = tokenizers.Tokenizer.from_file(str(path))
    ours = Tokenizer(path, num_threads=1, cache_bytes=0)
    rng = random.Random(8)
    added = [token["content"] for token in json.loads(path.read_text("utf-8"))["added_tokens"]]
    for text in texts()[::3]:
        for _ in range(rng.randint(0, 3)):
            spelling = rng.choice(added)
            # Whole, cut short, or doubled at its start.
            part = rng.choice((spelling, spelling[:-1], spelling[1:], spelling[:3] + spelling))
            at = rng.randint(0, len(text))
            text = text[:at] + part + text[at:]
        ids = list(memoryview(ours.encode_full(text)).cast("I"))
        assert ids == oracle.encode(text, add_special_tokens=False).ids, ascii(text)
        assert ours.count_full(text) == len(ids)
