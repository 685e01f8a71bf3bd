"""Tasks that repeat what stands in the question or in an earlier turn."""

from __future__ import annotations

from typing import Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.turns import Turn
from services.engine.training.tasks.words import NOUNS, ORDINALS

_WORD_FORMS: Final = (
    "Repeat after me: {}",
    "Repeat after me: {}",
    "Please repeat after me: {}",
    "Repeat: {}",
    "Please repeat: {}",
    "Repeat these words: {}",
    "Repeat the words: {}",
    "Say: {}",
    "Please say: {}",
    "Copy: {}",
    "Copy this: {}",
    "Write: {}",
    "Echo: {}",
    "Say {}",
    "Repeat {}",
)
_DIGIT_FORMS: Final = (
    "Copy the number {}",
    "Repeat the number {}",
    "Please copy the number {}",
    "Repeat this number: {}",
    "Say the number {}",
    "Write the number {}",
    "Copy: {}",
    "Repeat: {}",
    "Repeat after me: {}",
    "Say {}",
)
_AGAIN_FORMS: Final = (
    "Say that again.",
    "Say it again.",
    "Please say that again.",
    "Repeat that.",
    "Repeat your last answer.",
    "Can you repeat that?",
    "Once more please.",
    "Again please.",
    "What did you say?",
)
_EARLIER_FORMS: Final = (
    "Which words did I ask you to repeat?",
    "What did I ask you to repeat?",
    "What were the words that I asked you to repeat?",
    "Which words did you repeat?",
)
_LIST_FORMS: Final = ("Here is a list: {}.", "My list: {}.", "List: {}.", "Look at this list: {}.")
_POSITION_FORMS: Final = (
    "What is the {} word?",
    "What's the {} word?",
    "Which word is {}?",
    "Tell me the {} word.",
    "Give me the {} word.",
)


def copy_words(draw: Draw, memory: Memory) -> Turn:
    """Returns a phrase to repeat."""
    if draw.chance(0.15):  # what calls of tools copy, where a row has no place for tools yet
        num = draw.number(1, 3)
        words = draw.value(lambda: " ".join(draw.identifier() for _ in range(num)))
    else:
        words = draw.phrase(2, 6) if draw.chance(0.8) else draw.pair()
    memory.phrase = words
    asked = draw.typed(draw.one(_WORD_FORMS)).format(words)
    return Turn("copy_words", asked, words, "I repeat the words.", recalled=words, values=(words,))


def copy_digits(draw: Draw, memory: Memory) -> Turn:
    """Returns a number to repeat."""
    code = draw.code(3, 8)
    memory.phrase = ""  # what "the words I asked you to repeat" are would be open to dispute
    asked = draw.typed(draw.one(_DIGIT_FORMS)).format(code)
    return Turn("copy_digits", asked, code, "I repeat the number.", recalled=code, values=(code,))


def refer(draw: Draw, memory: Memory) -> Turn | None:
    """Returns a question about an earlier turn; None where there is none to ask about."""
    choices = []
    if memory.last is not None:
        choices.append(_again)
    if memory.phrase:
        choices.append(_earlier)
    return draw.one(choices)(draw, memory) if choices else None


def _again(draw: Draw, memory: Memory) -> Turn:
    said = memory.last or ""
    asked = draw.typed(draw.one(_AGAIN_FORMS))
    return Turn("refer", asked, said, "I said it already.", recalled=said)


def _earlier(draw: Draw, memory: Memory) -> Turn:
    answer = f"You asked me to repeat: {memory.phrase}"
    asked = draw.typed(draw.one(_EARLIER_FORMS))
    return Turn("refer", asked, answer, "They mean the words before.", recalled=memory.phrase)


def list_position(draw: Draw, _memory: Memory) -> Turn:
    """Returns a question for one word of a list, by its place."""

    def make() -> str:
        return ", ".join(draw.some(NOUNS, draw.number(3, 6)))

    listed = draw.value(make)
    words = listed.split(", ")
    index = draw.number(0, len(words) - 1)
    place = "last" if index == len(words) - 1 and draw.chance(0.3) else ORDINALS[index]
    asked = draw.one(_LIST_FORMS).format(listed) + " " + draw.one(_POSITION_FORMS).format(place)
    counted = ", ".join(f"{i + 1} {word}" for i, word in enumerate(words[: index + 1]))
    return Turn(
        "list",
        draw.typed(asked),
        f"The {place} word is {words[index]}.",
        counted + ".",
        recalled=words[index],
        values=(listed,),
    )
