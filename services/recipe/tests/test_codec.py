"""The typed face of the codec."""

import base64
import json
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.recipe import codec
from services.recipe.codec import CodecError, Options, Streams, StreamSpec, Tokenizer

CHAT = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Hi"}]}


def ids(token_ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(token_ids) // 4}I", token_ids))


def encode(body, tokenizer, options=None, limit=1_000_000):
    native = (options or Options()).native()
    return codec.encode("chat", json.dumps(body).encode(), native, tokenizer, limit)


def test_a_special_spelling_in_plain_text_never_becomes_its_id(tokenizer):
    text = "a<｜User｜></think>b"
    assert not {128803, 128822} & set(ids(tokenizer.encode_plain(text)))
    assert ids(tokenizer.encode_full(text))[1:3] == [128803, 128822]
    assert tokenizer.decode(tokenizer.encode_full(text)) == text


def test_prompt_ranges_are_bytes_and_are_checked(tokenizer):
    text = "你<｜User｜>"
    assert ids(tokenizer.encode_prompt(text, [(3, 3 + len("<｜User｜>".encode()))]))[-1] == 128803
    for bad in ([(0, 1)], [(3, 2)], [(0, 99)], [(3, 6), (4, 8)]):
        with pytest.raises(ValueError):
            tokenizer.encode_prompt(text, bad)
    with pytest.raises(CodecError) as refused:
        tokenizer.encode_prompt("你好", [(0, 3)])
    assert refused.value.status == 500
    assert refused.value.message == 'special token "你" is not in the added vocabulary'


def test_ids_of_every_kind_decode(tokenizer):
    assert tokenizer.num_ids == 129_280
    assert tokenizer.token_bytes(tokenizer.num_ids) is None
    assert tokenizer.decode(struct.pack("<2I", 4_000_000_000, 128822)) == "</think>"
    byte = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\xe4")
    assert tokenizer.token_text(byte) == "\\xe4"
    assert tokenizer.decode(struct.pack("<I", byte)) == "\ufffd"
    assert tokenizer.is_added(0)
    assert not tokenizer.is_added(300)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    assert tokenizer.decode(tokenizer.encode_full(text)) == text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["word ", "</think>", "<｜", "User｜>", "你好，", "7", "\n", "x" * 900])
    )
)
def test_the_count_of_text_in_parts_is_the_count_of_the_whole(tokenizer, parts):
    counter = tokenizer.counter()
    for part in parts:
        counter.push(part)
    assert counter.count() == tokenizer.count_full("".join(parts))


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"x"'])
def test_a_body_that_is_no_object_is_refused_without_naming_our_types(protocol, body):
    with pytest.raises(CodecError) as refused:
        codec.convert(protocol, body, Options().native())
    assert refused.value.message.startswith("invalid request body: ")
    assert refused.value.message.endswith("expected an object")


def test_an_error_carries_the_apis_body(tokenizer):
    with pytest.raises(CodecError) as refused:
        encode({**CHAT, "temperature": 3}, tokenizer)
    error = refused.value
    assert (error.kind, error.stage, error.status) == ("request", "convert", 400)
    assert json.loads(error.body)["error"]["message"] == error.message
    with pytest.raises(CodecError) as refused:
        encode(CHAT, tokenizer, limit=3)
    assert refused.value.kind == "context_length"
    assert "maximum context length is 3 tokens" in refused.value.message


def test_a_grown_conversation_is_encoded_from_the_cache(tokenizer_paths):
    tokenizer = Tokenizer(tokenizer_paths["v4.1"], cache_bytes=1 << 20)
    cold = Tokenizer(tokenizer_paths["v4.1"], cache_bytes=0)
    messages = [{"role": "user", "content": f"Question {i}: " + "why? " * 100} for i in range(8)]
    for num in range(1, 9):
        body = {**CHAT, "messages": messages[:num]}
        assert encode(body, tokenizer).token_ids() == encode(body, cold).token_ids()
    assert 0 < tokenizer.num_cached_bytes <= 1 << 20
    assert cold.num_cached_bytes == 0


def test_threads_share_one_tokenizer(tokenizer):
    texts = [f"thread {i} " * 500 + "漢字かな交じり文" * 50 for i in range(4)]
    alone = [tokenizer.encode_plain(text) for text in texts]
    together = [b""] * 4

    def work(index):
        for _ in range(5):
            together[index] = tokenizer.encode_plain(texts[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_large_text_is_the_same_on_one_thread_and_on_two(tokenizer_paths):
    one = Tokenizer(tokenizer_paths["v4.1"], num_threads=1)
    two = Tokenizer(tokenizer_paths["v4.1"], num_threads=2)
    for part in ("Some prose, 12345 words. ", "x", "ab", "的", "你好吗", " ", "\n", "e\u0301", "9"):
        text = part * (400_000 // len(part.encode()))
        assert one.encode_plain(text) == two.encode_plain(text), part


def test_other_tokenizers_load_and_others_are_refused(tokenizer_paths, tmp_path):
    document = json.loads(tokenizer_paths["v4.1"].read_text("utf-8"))
    model = document["model"]
    # A small vocabulary: the bytes and the first merges, all ids moved.
    kept = sorted(model["vocab"].items(), key=lambda item: item[1])[3 : 3 + 256 + 500]
    model["vocab"] = {token: index + 50 for index, (token, _) in enumerate(kept)}
    model["merges"] = model["merges"][:500]
    document["added_tokens"] = [
        {**token, "id": index} for index, token in enumerate(document["added_tokens"][:40])
    ]
    small = tmp_path / "small.json"
    small.write_text(json.dumps(document), "utf-8")
    tokenizer = Tokenizer(small)
    assert tokenizer.num_ids == 806
    assert tokenizer.decode(tokenizer.encode_plain("Hello, 世界")) == "Hello, 世界"
    assert tokenizer.added_id(document["added_tokens"][7]["content"]) == 7
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}"
    small.write_text(json.dumps(document), "utf-8")
    with pytest.raises(ValueError, match="pre-tokenizer"):
        Tokenizer(small)
    with pytest.raises(ValueError, match="cannot read"):
        Tokenizer(tmp_path / "none.json")


def open_stream(streams, tokenizer, body=CHAT, **spec):
    converted = codec.convert("chat", json.dumps(body).encode(), Options().native())
    spec = StreamSpec(response_id="r", created=0, call_id_seed=1, writes_events=True, **spec)
    return streams.open(converted.parse_state().encode(), tokenizer, spec)


def test_a_batch_gives_each_stream_what_it_would_get_alone(tokenizer):
    texts = ["plan</think>Hello there", "</think>\n\n42", "thinking on and on"]
    encoded = [ids(tokenizer.encode_full(text)) for text in texts]
    alone = []
    streams = Streams()
    for token_ids in encoded:
        handle = open_stream(streams, tokenizer)
        sse = b"".join(
            streams.tokens(handle, struct.pack("<I", token_id), 0).sse for token_id in token_ids
        )
        alone.append(sse + streams.finish(handle, "stop", 0).sse)
        assert streams.remove(handle)
    assert len(streams) == 0
    handles = [open_stream(streams, tokenizer) for _ in texts]
    together = [b""] * len(texts)
    for step in range(max(map(len, encoded))):
        live = [k for k, token_ids in enumerate(encoded) if step < len(token_ids)]
        pushed = streams.push_tokens(
            struct.pack(f"<{len(live)}I", *(handles[k] for k in live)),
            struct.pack(f"<{len(live)}I", *(1 for _ in live)),
            struct.pack(f"<{len(live)}I", *(encoded[k][step] for k in live)),
            0,
        )
        for index, k in enumerate(live):
            together[k] += pushed.sse_of(index)
    for k, handle in enumerate(handles):
        together[k] += streams.finish(handle, "stop", 0).sse
    assert together == alone


def test_handles_and_lengths_are_checked(tokenizer):
    streams = Streams()
    with pytest.raises(KeyError):
        streams.finish(0, "stop", 0)
    with pytest.raises(CodecError, match="state"):
        streams.open(b"{}", tokenizer, StreamSpec(response_id="r", created=0, call_id_seed=0))
    handle = open_stream(streams, tokenizer)
    with pytest.raises(ValueError, match="4 bytes"):
        streams.tokens(handle, b"abc", 0)
    with pytest.raises(ValueError, match="batch"):
        streams.push_tokens(struct.pack("<I", handle), struct.pack("<I", 2), b"\0\0\0\0", 0)


def test_a_model_with_a_smaller_vision_encoder_has_spans_of_its_own_size(tokenizer):
    png = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + b"IHDR" + (84).to_bytes(4, "big") * 2
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    sizes = []
    for options in (Options(), Options(image_max_tokens=64, image_min_pixels=84 * 84)):
        sizes.append(encode(body, tokenizer, options).images()[0][1])
    assert sizes == [184, 8]
