import json
from array import array

import pytest

from services.engine.requests import Sampling
from services.engine.sim.config import SimConfig, SpecialIds
from services.engine.sim.tokens import Cursor, Script, Scripts, prompt_digest, restrict, voice_for

IDS = SpecialIds()
CHAT = array("I", [0, IDS.user, 11, 12, IDS.assistant, IDS.think_end])
THINKING = array("I", [0, 5, IDS.user, 7, IDS.user, 11, 12, 13, IDS.assistant, IDS.think_start])


def speak(config, prompt, num, *, output=(), sampling=None, scripts=None, request_id="r"):
    """The first `num` tokens after prompt and output, or up to the end token."""
    sampling = sampling or Sampling()
    voice = voice_for(config, scripts or Scripts(config.scripts), request_id, prompt, sampling)
    cursor = Cursor(config.ids, prompt, output)
    said = []
    while len(said) < num:
        token = voice.say(cursor)
        cursor.advance(token.token_id)
        said.append(token)
        if token.token_id == config.ids.end:
            break
    return said


def ids_of(said):
    return [token.token_id for token in said]


def test_echo_answers_with_the_last_user_message_then_ends():
    assert ids_of(speak(SimConfig(mode="echo"), CHAT, 10)) == [11, 12, IDS.end]


def test_echo_closes_a_short_thought_first():
    config = SimConfig(mode="echo", think_tokens=2)
    said = ids_of(speak(config, THINKING, 20))
    assert said == [11, 12, IDS.think_end, 11, 12, 13, IDS.end]


def test_echo_leaves_images_and_other_special_ids_out():
    prompt = array("I", [0, IDS.user, IDS.image, IDS.image, 42, IDS.assistant, IDS.think_end])
    assert ids_of(speak(SimConfig(mode="echo"), prompt, 5)) == [42, IDS.end]


def test_a_prompt_without_chat_tokens_is_echoed_whole():
    assert ids_of(speak(SimConfig(mode="echo"), array("I", [9, 8]), 5)) == [9, 8, IDS.end]


@pytest.mark.parametrize("mode", ["hash", "echo"])
@pytest.mark.parametrize("prompt", [CHAT, THINKING])
def test_p_03_any_split_of_prompt_and_output_continues_the_same(mode, prompt):
    config = SimConfig(mode=mode, stop_every=40)
    sampling = Sampling(temperature=1.0, seed=77)
    whole = ids_of(speak(config, prompt, 60, sampling=sampling))
    for cut in range(len(whole)):
        rest = speak(config, prompt, 60 - cut, output=whole[:cut], sampling=sampling)
        assert ids_of(rest) == whole[cut:]


def test_ur_72_noise_depends_on_seed_position_and_prefix_only():
    config = SimConfig(mode="hash")
    seeded = [
        ids_of(speak(config, CHAT, 20, sampling=Sampling(temperature=1.0, seed=s), request_id=r))
        for s, r in ((1, "a"), (1, "b"), (2, "a"))
    ]
    assert seeded[0] == seeded[1]
    assert seeded[0] != seeded[2]
    greedy = [
        ids_of(speak(config, CHAT, 20, sampling=Sampling(temperature=0.0, seed=s))) for s in (1, 2)
    ]
    assert greedy[0] == greedy[1]


def test_hash_mode_closes_its_thought_and_says_only_plain_ids():
    config = SimConfig(mode="hash", think_tokens=5, stop_every=0)
    said = ids_of(speak(config, THINKING, 50))
    assert said[5] == IDS.think_end
    assert said.count(IDS.think_end) == 1
    assert all(2 < i < IDS.num_plain for i in said if i != IDS.think_end)


def test_scripts_are_found_by_request_id_then_prompt_then_default(tmp_path):
    config = SimConfig(mode="scripted", scripts=str(tmp_path))
    assert ids_of(speak(config, CHAT, 9)) == [11, 12, IDS.end]  # none: it echoes
    for name, first in (("default", 1), (prompt_digest(CHAT), 2), ("mine", 3)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"token_ids": [first * 10]}))
    assert ids_of(speak(config, THINKING, 9)) == [IDS.think_end, 10, IDS.end]
    assert ids_of(speak(config, CHAT, 9)) == [20, IDS.end]
    assert ids_of(speak(config, CHAT, 9, request_id="mine")) == [30, IDS.end]


def test_a_script_plays_reasoning_content_tool_calls_and_log_probabilities():
    script = Script.from_document(
        {
            "reasoning_token_ids": [5],
            "token_ids": [6],
            "tool_call_token_ids": [7, 8],
            "logprobs": [-0.25, -0.5],
            "top": [[[5, -0.25], [9, -2.0]]],
            "end": False,
        }
    )
    config = SimConfig(mode="scripted")
    sampling = Sampling(logprobs=True, top_logprobs=2)
    scripts = Scripts(registered={"r": script})
    said = speak(config, THINKING, 7, sampling=sampling, scripts=scripts)
    assert ids_of(said) == [5, IDS.think_end, 6, 7, 8, 8, 8]  # without an end: up to the limit
    assert said[0].logprob == -0.25
    assert said[0].top == ((5, -0.25), (9, -2.0))
    assert said[1].logprob == -0.5


def test_a_script_with_unknown_keys_is_refused():
    with pytest.raises(ValueError, match="token_idz"):
        Script.from_document({"token_idz": [1]})


def test_log_probabilities_come_only_when_asked_for_and_fall_with_the_rank():
    plain = speak(SimConfig(mode="hash"), CHAT, 3)
    assert all(token.top == () for token in plain)
    asked = speak(SimConfig(mode="hash"), CHAT, 3, sampling=Sampling(logprobs=True, top_logprobs=4))
    for token in asked:
        assert token.top[0] == (token.token_id, token.logprob)
        values = [logprob for _, logprob in token.top]
        assert values == sorted(values, reverse=True)


def test_a_mask_keeps_an_allowed_token_and_replaces_another():
    (token,) = speak(SimConfig(mode="echo"), CHAT, 1)
    allowed = (1 << token.token_id).to_bytes(16160, "little")
    assert restrict(token, allowed, 5) is token
    other = (1 << 3 | 1 << 77).to_bytes(16160, "little")
    assert {restrict(token, other, noise).token_id for noise in range(4)} == {3, 77}
    with pytest.raises(ValueError, match="no token"):
        restrict(token, bytes(16160), 0)
