"""The network under `pelagos up`: the full vocabulary, and experts that move over two processes.

Every service is a process. Two decode engines share the experts of one network (EP 2), and the
expert balancer moves them while requests run; answers are those of the network alone all the while.
Source: engine.md, sections 2.10 and 4; model.md, sections 2 and 21.1.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy.local import stack as local_stack
from deploy.local.plan import ProcessSpec, StackConfig, log_file, plan
from services.common.cli import main
from services.engine.evaluation.plain import PlainRun
from services.engine.evaluation.stack import StackAddress
from services.engine.evaluation.tokens import Output, TokenStack
from services.engine.model.presets import TINY_FULLVOCAB
from services.engine.model.settings import TorchConfig
from services.recipe import make_tokenizer
from tests.support.background_stack import BackgroundStack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 24
QUESTIONS = (
    "Why is the sky blue?",
    "Schreib mir ein Gedicht über den Regen in Köln.",
    "天空为什么是蓝色的？请用三句话回答。",
)
# Only what a request of text passes: no cache, images, grammars or scaling.
WITHOUT = ("encoder", "vision-lb", "so-compiler", "autoscaler", "store", "check")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint") / "full"
    tokenizer = make_tokenizer.build()["v4.1"]
    arguments = ["--preset", "tiny-fullvocab", "--tokenizer", str(tokenizer)]
    assert main(["model", "make-random", str(made), *arguments]) == 0
    return made


@pytest.fixture(scope="module")
def running(tmp_path_factory, checkpoint) -> Iterator[BackgroundStack]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{free.getsockname()[1]}"
    group = (
        "--model.torch.group_size=2",
        f"--model.torch.group_store={store}",
        "--model.torch.extra_experts=2",
        "--rebalance_steps=10",
    )

    def grouped(config: StackConfig) -> tuple[ProcessSpec, ...]:
        specs = []
        for spec in plan(config):
            if spec.service == "decode":
                rank = int(spec.name.removeprefix("decode-")) - 1
                own = (*spec.flags, *group, f"--model.torch.group_rank={rank}")
                spec = replace(spec, flags=own)
            specs.append(spec)
        return tuple(specs)

    config = StackConfig(
        folder=tmp_path_factory.mktemp("stack"),
        engine="torch",
        checkpoint=checkpoint,
        num_decode=2,
        num_prefill=1,
        num_entrypoints=1,
        without=WITHOUT,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_stack, "plan", grouped)
        with BackgroundStack(config) as stack:
            yield stack


@pytest.fixture(scope="module")
def alone(checkpoint) -> Iterator[PlainRun]:
    run = PlainRun(TorchConfig(checkpoint=str(checkpoint)))
    yield run
    run.close()


def run_all(stack: BackgroundStack, prompts: Sequence[Sequence[int]], wave: int) -> list[Output]:
    """Runs prompts at once, through entrypoint, prefill and whichever decode engine."""
    address = StackAddress.of_state(local_stack.read_state(stack.stack.folder))

    async def ask() -> list[Output]:
        async with TokenStack.opened(address) as tokens:
            return await asyncio.gather(
                *(
                    tokens.run(ids, salt="", max_tokens=NUM_TOKENS, request_id=f"w{wave}-{at}")
                    for at, ids in enumerate(prompts)
                )
            )

    return stack.run(ask(), timeout_s=200)


def test_the_full_vocabulary_gives_the_tokens_of_the_runner_alone(running, alone):
    address = StackAddress.of_state(local_stack.read_state(running.stack.folder))

    async def encode() -> list[array[int]]:
        async with TokenStack.opened(address) as tokens:
            return [
                await tokens.prompt({"messages": [{"role": "user", "content": text}]})
                for text in QUESTIONS
            ]

    prompts = running.run(encode())
    assert max(map(max, prompts)) >= 128000, "the format's own tokens are the last of the table"
    said = run_all(running, prompts, 0)
    assert [output.error for output in said] == [""] * len(said)
    expected = [alone.cold(ids, NUM_TOKENS, ()).token_ids for ids in prompts]
    assert [output.token_ids for output in said] == expected
    assert max(map(max, expected)) > 2048, "more than the small table's ids are said"


def test_answers_are_the_same_while_the_balancer_moves_experts_between_two_processes(
    running, alone
):
    vocab = TINY_FULLVOCAB.text.vocab_size - 2000
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, vocab, num).tolist() for num in (12, 40, 77, 30)]
    expected = [alone.cold(ids, NUM_TOKENS, ()).token_ids for ids in prompts]
    log, moves = log_file(running.stack.config, "decode-1"), 0
    for wave in range(1, 40):
        said = run_all(running, prompts, wave)
        assert [output.error for output in said] == [""] * len(said)
        assert [output.token_ids for output in said] == expected, (wave, moves)
        if moves:
            break  # a whole wave behind the move
        moves = log.read_text().count("experts moved")
    assert moves, log.read_text()[-2000:]
    assert "experts stay where they are" not in log.read_text()
