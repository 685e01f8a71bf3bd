"""Questions and pictures as a running stack is asked them."""

from __future__ import annotations

import io
import json
from itertools import islice

from PIL import Image

from services.engine.training.tasks.draw import Draw, is_held_out
from services.engine.training.tasks.pictures import RGB, picture
from services.engine.training.tasks.questions import questions
from services.engine.training.tasks.stages import KINDS, Stage
from services.engine.training.tasks.turns import MODEL
from services.recipe.client import codec


def test_questions_are_of_the_kinds_asked_for_and_the_codec_takes_them() -> None:
    options = codec.Options(models={MODEL: "v4.1"}).native()
    seen = set()
    for question in islice(questions(Stage.TOOLS, 768), 600):
        codec.convert("chat", json.dumps(question.body()).encode(), options)
        assert question.messages[-1]["role"] in ("user", "tool")
        seen.add(question.kind)
    assert seen == set(KINDS)
    sums = list(islice(questions(Stage.MIXED, 192, kinds=("sum2",)), 20))
    assert {question.kind for question in sums} == {"sum2"}
    assert sums == list(islice(questions(Stage.MIXED, 192, kinds=("sum2",)), 20))


def test_a_picture_shows_the_colours_that_its_answer_names() -> None:
    drawn = picture(Draw("picture", "held_out"))
    image = Image.open(io.BytesIO(drawn.png()))
    width, height = image.size
    places = [(x, y) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    found = [image.convert("RGB").getpixel(place) for place in places]
    question = drawn.question()
    assert found == [RGB[name] for name in str(question.expected).split()]
    assert is_held_out(str(question.expected))
    options = codec.Options(models={MODEL: "v4.1"}).native()
    converted = codec.convert("chat", json.dumps(question.body()).encode(), options)
    assert "<｜User｜>Copy:\n\n<｜image｜><｜Assistant｜>" in converted.prompt
