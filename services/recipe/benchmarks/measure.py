"""The measurements of `bench_recipe`, run in the peers' environment.

    python -m services.recipe.benchmarks.measure TOKENIZER_JSON OUTPUT NUM_THREADS [--quick]

It imports of Pelagos only the codec, so it needs none of its dependencies.
"""

from __future__ import annotations

import importlib
import json
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from services.recipe import codec
from services.recipe.benchmarks import corpus

Clock = Callable[[], float]
Encode = Callable[[str], Any]
# Makes a fresh tokenizer and returns how it encodes, and how to count its ids.
Maker = Callable[[], Encode]

SEED: Final = 20_240
_NUM_SLICES: Final = 5


def makers(path: Path, num_threads: int) -> dict[str, Maker]:
    """Returns every tokenizer at hand by name, ours first."""
    found: dict[str, Maker] = {
        "ours": lambda: codec.Tokenizer(path, num_threads=num_threads, cache_bytes=0).encode_plain
    }
    add: dict[str, Callable[[Any], Maker]] = {
        "tokenizers": lambda m: lambda: _huggingface(m, path),
        "fastokens._native": lambda m: lambda: m.Tokenizer.from_file(str(path)).encode_ordinary,
        "gigatoken": lambda m: lambda: m.Tokenizer(str(path)).encode,
        "deepseek_recipe": lambda m: lambda: m.Tokenizer.from_file(str(path)).encode,
    }
    for module, make in add.items():
        try:
            imported = importlib.import_module(module)
            maker = make(imported)
            maker()("probe")
        except Exception as error:
            print(f"bench-recipe: {module} is left out: {error}", file=sys.stderr)
            continue
        found[module.partition(".")[0].replace("_", "-")] = maker
    return found


def _huggingface(module: Any, path: Path) -> Encode:
    tokenizer = module.Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def id_list(encoded: Any) -> list[int]:
    """Returns the ids of any tokenizer's answer."""
    if isinstance(encoded, bytes):
        return list(memoryview(encoded).cast("I"))
    if hasattr(encoded, "ids"):
        return list(encoded.ids)
    return [int(token_id) for token_id in encoded]


def seconds(work: Callable[[], Any], clock: Clock = time.process_time) -> float:
    """Returns how long one call takes: of the processor's time, unless told otherwise.

    A shared machine takes the processor away in the middle of a call, from one peer more than from
    another. Only what is spread over threads has to be measured by the clock on the wall.
    """
    start = clock()
    work()
    return clock() - start


def encode_rows(
    path: Path, num_threads: int, texts: dict[str, list[str]], slow_bytes: int
) -> list[dict[str, Any]]:
    """Measures each text, all tokenizers in turn, each time on text they have not seen."""
    rows = []
    clock = time.process_time if num_threads == 1 else time.perf_counter
    tokenizers = makers(path, num_threads)
    first_words = "The first words a fresh tokenizer sees are not measured; 它的第一次也不算。"
    for name, slices in texts.items():
        rates: dict[str, list[float]] = {}
        exact: dict[str, bool] = {}
        made: dict[str, Encode] = {}
        wanted: list[int] = []
        for index, text in enumerate(slices):
            num_bytes = len(text.encode("utf-8"))
            if index and text == slices[index - 1]:
                made.clear()  # the same text again: only a fresh tokenizer has not seen it
            # Ours first in one round, last in the next: nobody always has the warmer machine.
            names = list(tokenizers)
            for peer in names if index % 2 == 0 else names[::-1]:
                is_slow = peer in ("tokenizers", "deepseek-recipe")
                if is_slow and (num_bytes > slow_bytes or index > 1):
                    continue
                if peer not in made:
                    made[peer] = tokenizers[peer]()
                    # Of few words, so that none is known, but enough text to start all threads.
                    made[peer](first_words * (50 if num_bytes < 100_000 else 3_000))
                encode = made[peer]
                elapsed_s = seconds(partial(encode, text), clock)
                rates.setdefault(peer, []).append(num_bytes / 1e6 / max(elapsed_s, 1e-7))
                if index == 0:
                    ids = id_list(encode(text))
                    wanted = ids if peer == "ours" else wanted
                    exact[peer] = ids == wanted
        medians = {peer: statistics.median(found) for peer, found in rates.items()}
        rows.append({"text": name, "mb_per_s": medians, "exact": exact})
        print(f"{name}: {medians}", file=sys.stderr, flush=True)
    return rows


def slices_of(text: str, num_bytes: int, num: int) -> list[str]:
    """Cuts parts of so many bytes out of a text, as far apart as it allows."""
    data = text.encode("utf-8")
    step = max(0, (len(data) - num_bytes) // max(1, num - 1))
    starts = [step * index for index in range(num if step else 1)]
    return [data[start : start + num_bytes].decode("utf-8", "ignore") for start in starts]


def texts_of(path: Path, quick: bool) -> dict[str, list[str]]:
    """Returns the texts by name, each in several slices."""
    texts = {}
    largest = 1_500_000 if quick else 8_000_000
    for kind in corpus.KINDS:
        whole = corpus.make(kind, largest, SEED, path)
        texts[f"{kind}, 10 KB"] = slices_of(whole, 10_000, 2 * _NUM_SLICES)
        texts[f"{kind}, 1 MB"] = slices_of(whole, 1_000_000, _NUM_SLICES if quick else 8)
        if not quick:
            texts[f"{kind}, 8 MB"] = [whole] * 3
    return texts


# -- whole requests and streams


def conversation(num_turns: int, num_tools: int) -> dict[str, Any]:
    """A request of so many turns, a call and its result in every fourth."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{index}",
                "description": f"Looks up thing number {index} in the register of things.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "query": {"type": "string", "description": "What to look for"},
                        "limit": {"type": "integer", "minimum": 1, "maximum": 50 + index},
                    },
                    "required": ["query"],
                },
            },
        }
        for index in range(num_tools)
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be helpful and brief."}]
    for turn in range(num_turns):
        messages.append(
            {"role": "user", "content": f"Question {turn}: what about item {turn * 7}?"}
        )
        if turn % 4 == 3:
            call = {
                "name": "tool_1",
                "arguments": json.dumps({"query": f"item {turn}", "limit": 3}),
            }
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "I should look it up.",
                    "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
                }
            )
            messages.append(
                {"role": "tool", "tool_call_id": f"call_{turn}", "content": f"Result {turn}: fine"}
            )
        messages.append(
            {
                "role": "assistant",
                "content": f"Answer {turn}: item {turn * 7} is in good order, as far as I can see.",
                "reasoning_content": f"The user asks about {turn}.",
            }
        )
    messages.append({"role": "user", "content": "And the last one?"})
    return {"model": "DeepSeek-V4.1-Flash", "messages": messages, "tools": tools}


def median_of(num: int, work: Callable[[], Any]) -> float:
    """Returns the median time of `num` calls after one that does not count."""
    work()
    return statistics.median(seconds(work) for _ in range(num))


def path_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Measures whole requests and streams beside the official codec."""
    try:
        peer: Any = importlib.import_module("deepseek_recipe")
    except Exception:
        peer = None
    options = codec.Options().native()
    tokenizer = codec.Tokenizer(path, num_threads=1)
    body = json.dumps(conversation(100, 20)).encode()

    row: dict[str, Any] = {"what": "convert and render, 100 turns, 20 tools", "unit": "ms"}
    row["ours"] = 1e3 * median_of(50, lambda: codec.convert("chat", body, options))
    if peer:
        encoding = peer.DeepseekV41Encoding()
        peer_options = peer.ConversionOptions()

        def theirs() -> Any:
            request = peer.ChatCompletionRequest(body).convert(peer_options)
            return encoding.render_conversation(request.conversation)

        row["theirs"] = 1e3 * median_of(20, theirs)
    yield row

    for kind in ("again", "one turn longer"):
        row = {"what": f"encode the whole request, {kind}", "unit": "ms"}
        grown = [json.dumps(conversation(100 + turns, 20)).encode() for turns in range(12)]
        bodies = [body] * 12 if kind == "again" else grown
        times = [
            seconds(partial(codec.encode, "chat", b, options, tokenizer, 1 << 20)) for b in bodies
        ]
        row["ours"] = 1e3 * statistics.median(times[1:])
        if peer:
            with_tokenizer = peer.DeepseekV41Encoding().with_tokenizer(
                peer.Tokenizer.from_file(str(path))
            )

            def encode_theirs(b: bytes, encoding: Any = with_tokenizer) -> Any:
                request = peer.ChatCompletionRequest(b).convert(peer.ConversionOptions())
                return encoding.encode(request.conversation)

            row["theirs"] = 1e3 * statistics.median(
                seconds(partial(encode_theirs, b)) for b in bodies[:4]
            )
        yield row
    yield from stream_rows(path, tokenizer, options, peer)


def stream_rows(
    path: Path, tokenizer: codec.Tokenizer, options: Any, peer: Any
) -> Iterator[dict[str, Any]]:
    """Measures a token's way to an event, one by one and in batches of 64 streams."""
    text = "Let me think about the numbers.</think>The answer is 42, as everybody knows. " * 300
    ids = list(memoryview(tokenizer.encode_full(text)).cast("I"))[:6_000]
    packed = [struct.pack("<I", token_id) for token_id in ids]
    bodies = {
        "chat": {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
        "responses": {"input": "Hi", "stream": True},
        "messages": {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 10_000,
            "stream": True,
            "thinking": {"type": "enabled"},
        },
    }
    peer_tokenizer = peer.Tokenizer.from_file(str(path)) if peer else None
    classes = {"chat": "ChatCompletion", "responses": "Responses", "messages": "Messages"}
    for protocol, fields in bodies.items():
        body = json.dumps({"model": "DeepSeek-V4.1-Flash", **fields}).encode()
        state = codec.convert(protocol, body, options).parse_state().encode()  # type: ignore[arg-type]
        spec = codec.StreamSpec(response_id="r", created=0, call_id_seed=1)

        def one_by_one(state: bytes = state, spec: codec.StreamSpec = spec) -> None:
            streams = codec.Streams()
            handle = streams.open(state, tokenizer, spec)
            for token_id in packed:
                streams.tokens(handle, token_id, 0)

        def batched(state: bytes = state, spec: codec.StreamSpec = spec) -> None:
            streams = codec.Streams()
            handles = [streams.open(state, tokenizer, spec) for _ in range(64)]
            all_handles = struct.pack("<64I", *handles)
            ones = struct.pack("<64I", *([1] * 64))
            for token_id in packed[:600]:
                streams.push_tokens(all_handles, ones, token_id * 64, 0)

        theirs: float | None = None
        if peer:
            request_class = getattr(peer, f"{classes[protocol]}Request")

            def peer_stream(body: bytes = body, request_class: Any = request_class) -> None:
                request = request_class(body)
                converted = request.convert(peer.ConversionOptions())
                generator = request_class.chunk_generator(converted, "r", "m")
                processor = peer.StreamProcessor(
                    generator, converted.parsing_options, peer_tokenizer
                )
                for token_id in ids[:2_000]:
                    for event in processor.push(peer.InferenceChunk.tokens([token_id])):
                        event.to_json()

            theirs = 1e6 * median_of(3, peer_stream) / 2_000
        single = 1e6 * median_of(5, one_by_one) / len(ids)
        batch = 1e6 * median_of(5, batched) / (600 * 64)
        yield _row(f"stream, {protocol}, per token", "µs", single, theirs)
        yield _row(f"stream, {protocol}, per token, 64 streams a call", "µs", batch, theirs)
    yield finish_row(tokenizer, options)


def finish_row(tokenizer: codec.Tokenizer, options: Any) -> dict[str, Any]:
    """Measures the finish after 64k tokens of reasoning: the count must not start then."""
    body = json.dumps(
        {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Hi"}]}
    ).encode()
    state = codec.convert("chat", body, options).parse_state().encode()
    text = "First, 计算一下这个数字，then compare it with the other one. " * 6_000
    reasoning = tokenizer.encode_plain(text)[: 4 * 65_536]
    times = []
    for _ in range(5):
        streams = codec.Streams()
        spec = codec.StreamSpec(response_id="r", created=0, call_id_seed=1, keeps_response=False)
        handle = streams.open(state, tokenizer, spec)
        for start in range(0, len(reasoning), 4 * 16):
            streams.tokens(handle, reasoning[start : start + 4 * 16], 0)
        times.append(seconds(partial(streams.finish, handle, "stop", 0)))
    return _row("finish after 65,536 reasoning tokens", "ms", 1e3 * statistics.median(times), None)


def _row(what: str, unit: str, ours: float, theirs: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "unit": unit, "ours": ours}
    if theirs is not None:
        row["theirs"] = theirs
    return row


def growth_rows(path: Path, quick: bool) -> list[dict[str, Any]]:
    """Compares the time of an input with that of one eight times as long."""
    small, large = (125_000, 1_000_000) if quick else (1_000_000, 8_000_000)
    shorter, longer = corpus.pathological(small, SEED), corpus.pathological(large, SEED)
    rows = []
    for name in shorter:
        encode = codec.Tokenizer(path, num_threads=1, cache_bytes=0).encode_plain
        times = [
            min(seconds(partial(encode, text)) for _ in range(3))
            for text in (shorter[name], longer[name])
        ]
        rows.append({"text": name, "ratio": times[1] / times[0]})
    return rows


def main() -> None:
    """Measures everything and writes it as JSON."""
    path, output, num_threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    quick = "--quick" in sys.argv
    result: dict[str, Any] = {
        "encode": encode_rows(path, num_threads, texts_of(path, quick), 1_000_000)
    }
    if num_threads == 1:
        hard = {
            f"{name}, 1 MB": [text] for name, text in corpus.pathological(1_000_000, SEED).items()
        }
        result["hard"] = encode_rows(path, num_threads, hard, 0)
        result["growth"] = growth_rows(path, quick)
        result["paths"] = list(path_rows(path))
    output.write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
