"""Facts that are told once and asked for later, beside each other and in passages of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Fact, Memory
from services.engine.training.tasks.turns import Turn
from services.engine.training.tasks.words import ADJECTIVES, CITIES, COLORS, FOODS, NAMES, NOUNS


@dataclass(frozen=True)
class _Attribute:
    name: str
    make: Callable[[Draw], str]
    is_split: bool = False


def _code(draw: Draw) -> str:
    return draw.code(4, 6)


def _age(draw: Draw) -> str:
    return str(draw.number(10, 99))


_ANIMALS: Final = ("lion", "cat", "dog", "fish", "fox", "ant", "mouse")
_ATTRIBUTES: Final = (
    _Attribute("project", Draw.pair, True),
    _Attribute("password", Draw.pair, True),
    _Attribute("team", Draw.pair, True),
    _Attribute("boat", Draw.pair, True),
    _Attribute("secret word", Draw.pair, True),
    _Attribute("code", _code, True),
    _Attribute("door code", _code, True),
    _Attribute("room number", _code, True),
    _Attribute("age", _age),
    _Attribute("favorite color", lambda draw: draw.one(COLORS)),
    _Attribute("favorite food", lambda draw: draw.one(FOODS)),
    _Attribute("favorite city", lambda draw: draw.one(CITIES)),
    _Attribute("favorite animal", lambda draw: draw.one(_ANIMALS)),
    _Attribute("dog", Draw.name),
    _Attribute("cat", Draw.name),
    _Attribute("teacher", Draw.name),
    _Attribute("friend", Draw.name),
    _Attribute("car", lambda draw: draw.one(COLORS)),
)
_ASKED: Final = (
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "Tell me {}.",
    "Do you remember {}?",
    "Can you tell me {}?",
    "Do you know {}?",
    "Say {}.",
)
_NOTED: Final = ("Note: {}", "Note that {}", "Please note: {}", "Please note that {}", "Note {}")
_KEPT: Final = ("{}", "{}", "{}", "Remember: {}", "Remember that {}", "Please remember that {}")
_OF_OTHERS: Final = "They tell me a fact."
_UNTOLD: Final = "You have not told me that."


def _my_name(draw: Draw) -> Fact:
    name = draw.name()
    questions = (
        "What is my name?",
        "What's my name?",
        "Who am I?",
        "Do you know my name?",
        "Do you remember my name?",
        "Tell me my name.",
        "Say my name.",
        "How am I called?",
    )
    told = draw.one(("my name is {}.", "my name is {}.", "my name is {}.", "my name's {}."))
    return Fact("my name", told.format(name), questions, f"Your name is {name}.", name)


def _my_home(draw: Draw) -> Fact:
    city = draw.one(CITIES)
    questions = (
        "Where do I live?",
        "Do you know where I live?",
        "Which city do I live in?",
        "Tell me where I live.",
        "Do you remember where I live?",
    )
    return Fact("my home", f"I live in {city}.", questions, f"You live in {city}.", city)


def _my_taste(draw: Draw) -> Fact:
    food = draw.one(FOODS)
    questions = ("What do I like?", "Do you know what I like?", "Tell me what I like.")
    return Fact("my taste", f"I like {food}.", questions, f"You like {food}.", food)


def _attribute(draw: Draw) -> Fact:
    attribute = draw.one(_ATTRIBUTES)
    value = attribute.make(draw)
    if draw.chance(0.7):
        asked, answered = f"my {attribute.name}", f"Your {attribute.name}"
    else:
        asked = answered = f"{draw.one(NAMES)}'s {attribute.name}"
    return Fact(
        asked,
        f"{asked} is {value}.",
        tuple(form.format(asked) for form in _ASKED),
        f"{answered} is {value}.",
        value,
        is_split=attribute.is_split,
    )


def _home_of_someone(draw: Draw) -> Fact:
    name, city = draw.one(NAMES), draw.one(CITIES)
    questions = (
        f"Where does {name} live?",
        f"Do you know where {name} lives?",
        f"Tell me where {name} lives.",
    )
    told = f"{name} lives in {city}."
    return Fact(f"{name}'s home", told, questions, told, city)


_MAKERS: Final = (
    (_my_name, 0.18),
    (_my_home, 0.08),
    (_my_taste, 0.06),
    (_attribute, 0.6),
    (_home_of_someone, 0.08),
)
# For training: few are told where someone else lives, and it is what was got wrong the most.
_MAKERS_HARD: Final = (
    (_my_name, 0.2),
    (_my_home, 0.08),
    (_my_taste, 0.06),
    (_attribute, 0.5),
    (_home_of_someone, 0.16),
)


def _any_fact(draw: Draw) -> Fact:
    return draw.weighted(_MAKERS_HARD if draw.stresses_hard else _MAKERS)(draw)


def fresh_fact(draw: Draw, memory: Memory) -> Fact:
    """Returns a fact about something that this conversation has not told yet."""
    while True:
        fact = _any_fact(draw)
        if fact.key not in memory.facts:
            return fact


def tell(draw: Draw, memory: Memory) -> Turn:
    """Returns a turn that tells a fact; the wording decides whether it is said back."""
    fact = fresh_fact(draw, memory)
    memory.facts[fact.key] = fact
    values = (fact.value,) if fact.is_split else ()
    if draw.chance(0.3):
        asked = draw.typed(draw.one(_NOTED).format(fact.told))
        return Turn("fact", asked, "Noted.", "I note that.", values=values)
    if fact.key == "my name":
        asked, answer = _introduction(draw, fact), f"Nice to meet you, {fact.value}."
    else:
        asked = draw.one(_KEPT).format(fact.told)
        asked = asked[:1].upper() + asked[1:]
        answer = f"I will remember that {_in_second_person(fact.answer)}"
    thought = f"They tell me their {fact.key[3:]}." if fact.key.startswith("my ") else _OF_OTHERS
    # A name at the start keeps its capital.
    asked = draw.typed(asked) if asked.startswith(("My", "Remember", "Please")) else asked
    return Turn("fact", asked, answer, thought, recalled=fact.value, values=values)


def _introduction(draw: Draw, fact: Fact) -> str:
    if draw.chance(0.4):
        form = draw.one(("I am {}.", "I'm {}.", "Call me {}.", "This is {}."))
        told = form.format(fact.value)
    else:
        told = fact.told[:1].upper() + fact.told[1:]
    return draw.one(("Hi, ", "Hello, ", "Hi! ")) + told if draw.chance(0.25) else told


def _in_second_person(answer: str) -> str:
    return answer[:1].lower() + answer[1:] if answer.startswith("You") else answer


def recall(draw: Draw, memory: Memory) -> Turn | None:
    """Returns a question for an earlier fact; None where nothing was told."""
    if not memory.facts:
        return None
    told = [fact for fact in memory.facts.values() if fact.kind == "recall"]
    hidden = [fact for fact in memory.facts.values() if fact.kind == "needle"]
    return ask(draw, draw.one(told if not hidden or (told and draw.chance(0.7)) else hidden))


def ask(draw: Draw, fact: Fact) -> Turn:
    """Returns the question for a fact."""
    values = (fact.value,) if fact.is_split else ()
    thought = f"I was told: {fact.told}"
    asked = draw.typed(draw.one(fact.questions))
    return Turn(fact.kind, asked, fact.answer, thought, recalled=fact.value, values=values)


def unknown(draw: Draw, memory: Memory) -> Turn:
    """Returns a question for something that nobody has told."""
    while True:
        fact = _any_fact(draw)
        if fact.key not in memory.facts and fact.key not in memory.keys_before:
            asked = draw.typed(draw.one(fact.questions))
            return Turn("unknown", asked, _UNTOLD, "I was not told that.")


# ---- passages ----------------------------------------------------------------------------------

_FILLERS: Final = (
    "The {a} {n} is near the {m}.",
    "A {n} stands in the {a} {m}.",
    "There is a {a} {n} in the {m}.",
    "The {n} and the {m} are {a}.",
    "{p} has a {a} {n}.",
    "{p} walks to the {a} {m}.",
    "{p} likes the {n} in {c}.",
    "The {n} of {p} is {a}.",
    "In {c} the {n} is {a}.",
)
_READ: Final = ("Read this: {}", "Here is a text: {}", "Read this text: {}", "Text: {}")


def filler(draw: Draw) -> str:
    """Returns a sentence that nobody asks about."""
    first, second = draw.some(NOUNS, 2)
    return draw.one(_FILLERS).format(
        a=draw.one(ADJECTIVES), n=first, m=second, p=draw.one(NAMES), c=draw.one(CITIES)
    )


def _thing_fact(draw: Draw) -> Fact:
    thing = f"the {draw.one((*COLORS, *ADJECTIVES[:20]))} {draw.one(NOUNS)}"
    what = draw.weighted((("code", 0.6), ("owner", 0.2), ("name", 0.2)))
    value = draw.code(4, 4) if what == "code" else draw.name()
    key = f"the {what} of {thing}"
    told = f"The {what} of {thing} is {value}."
    questions = tuple(form.format(key) for form in _ASKED)
    return Fact(key, told, questions, told, value, "needle", is_split=what == "code")


def passage(
    draw: Draw, memory: Memory, num_fillers: int, num_needles: int
) -> tuple[str, list[Fact]]:
    """Returns a text with a few facts hidden in it, none about what was told before."""
    needles: dict[str, Fact] = {}
    while len(needles) < num_needles:
        fact = _thing_fact(draw)
        if fact.key not in memory.facts:
            needles[fact.key] = fact
    sentences = [filler(draw) for _ in range(num_fillers)]
    for fact in needles.values():
        sentences.insert(draw.number(0, len(sentences)), fact.told)
    return " ".join(sentences), list(needles.values())


def needle(draw: Draw, memory: Memory) -> Turn:
    """Returns a passage, with the question for one of its facts or to be asked about later."""
    text, needles = passage(draw, memory, draw.number(1, memory.max_fillers), draw.number(1, 3))
    values = tuple(fact.value for fact in needles if fact.is_split)
    memory.facts |= {fact.key: fact for fact in needles}
    if draw.chance(0.3):
        return Turn("fact", draw.one(_READ).format(text), "Noted.", "I note that.", values=values)
    turn = ask(draw, draw.one(needles))
    asked = turn.question[:1].upper() + turn.question[1:]
    question = f"{asked} {text}" if draw.chance(0.15) else f"{text} {asked}"
    return Turn(
        "needle", question, turn.answer, turn.thought, recalled=turn.recalled, values=values
    )
