"""The words that the tasks are made of.

Every word here is one token of the large vocabulary, at the start of a text and behind a space:
what is to be learned is copying and looking up, not spelling. Of those words, these need the
fewest merges.
"""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS: Final = _words("""
    bread fish water cake rice book train ring lion lake cat hat pen table car bell star rain fire
    bag wall bed ball nail ant house mouse tree stone dog road room rope rose farm sea seed boat
    song sun wind window king bank key box fox cup map card
""")
ADJECTIVES: Final = _words("""
    light old big long hot cold cool hard wet weak low wide short fast dark quiet dry rich poor
    high sharp bright wild late thin new small slow
""")
COLORS: Final = _words("red orange blue black gold green gray white yellow")
NAMES: Final = _words("""
    Ben Tom Sam Bob Jack Mark Eric Tim Jim Kim Kate Ken Max Peter Mary James Alex Jane Ian Brian
    Bill Joe Dan Daniel Ana Anna John Lisa
""")
CITIES: Final = _words("York Paris London Rome Boston Berlin Austin Tokyo Sydney Toronto")
FOODS: Final = _words("tea fish water bread rice cake apple")

# Values of JSON and of tool arguments stand behind a quote or a bracket there and behind a space
# in the sentence: two tokens for one word, learned word by word, hence few of them.
# Source: small-model.md, section 8.
FEW_NAMES: Final = _words("Ana Ben Tom Kim Max Jack Sam Mary Alex John")
FEW_CITIES: Final = CITIES
FEW_COLORS: Final = COLORS
FEW_FOODS: Final = FOODS

ORDINALS: Final = _words("first second third fourth fifth sixth")

# Pieces of names that nobody has: a copied name need not be a known one.
SYLLABLES: Final = _words("""
    ba be bo da de do ka ki ko la li lo ma mi mo na ni no ra ri ro ta to va vi zo
""")

# Verb and thing of the names of made-up tools. So many that they are copied, not known: of 36 names
# the model said those it had met. The large tokenizer cuts each name into pieces that the small
# vocabulary has.
VERBS: Final = _words("load open find check move read write show make stop count add")
THINGS: Final = _words("""
    window map book car box table fish water cake train ring cat hat pen rain fire wall ball ant
    house mouse road room rope rose farm sea boat wind king fox cup
""")
