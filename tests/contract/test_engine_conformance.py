"""The conformance suite passes our engines, and fails engines that break what it checks."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.rpc_client import Channels
from services.common.service import RuntimeConfig, running
from services.decode.config import DecodeConfig
from services.decode.main import build_engine as build_decode
from services.encoder.config import EncoderConfig
from services.encoder.main import build_engine as build_encoder
from services.engine.config import ModelConfig
from services.engine.conformance import run_conformance
from services.engine.sim.config import SimConfig
from services.prefill.config import PrefillConfig
from services.prefill.main import build_engine as build_prefill
from tests.contract.engine_parts import quick_model

RUNTIME = RuntimeConfig(uvloop=False)
SMALL = quick_model()
FLASH = ModelConfig(max_model_len=4096, sim=SimConfig(time_scale=0.0))


async def suite(
    name: str,
    config: Any,
    build: Any,
    spoil: Any = lambda core: None,
    settle_s: float = 15.0,
) -> dict:
    cores = []

    async def keep(runtime: Any) -> None:
        cores.append(await build(runtime))
        spoil(cores[0])

    async with running(name, config, keep) as runtime:
        channels = Channels()
        try:
            outcomes = await run_conformance(channels, runtime.address, settle_s)
        finally:
            await channels.close()
    return {outcome.name: outcome for outcome in outcomes}


@pytest.mark.parametrize(
    ("name", "config", "build"),
    [
        ("prefill", PrefillConfig(num_blocks=200, model=SMALL, runtime=RUNTIME), build_prefill),
        ("prefill", PrefillConfig(num_blocks=80, model=FLASH, runtime=RUNTIME), build_prefill),
        ("decode", DecodeConfig(num_blocks=100, model=SMALL, runtime=RUNTIME), build_decode),
        ("decode", DecodeConfig(num_blocks=80, model=FLASH, runtime=RUNTIME), build_decode),
        ("encoder", EncoderConfig(runtime=RUNTIME), build_encoder),
    ],
)
async def test_our_engines_pass_and_every_check_is_driven(name, config, build):
    outcomes = await suite(name, config, build)
    assert {o.result for o in outcomes.values()} == {"passed"}, outcomes
    assert len(outcomes) >= 6


async def test_a_leaking_decode_engine_fails():
    config = DecodeConfig(num_blocks=100, model=SMALL, runtime=RUNTIME)

    def spoil(core: Any) -> None:
        core.ranks[0].blocks.allocate(3)

    outcomes = await suite("decode", config, build_decode, spoil, settle_s=0.3)
    assert outcomes["T9 nothing is left"].result == "failed"


async def test_an_engine_that_takes_damaged_bytes_fails():
    config = DecodeConfig(num_blocks=100, model=SMALL, runtime=RUNTIME)

    def spoil(core: Any) -> None:
        core.ranks[0].runner.verify = lambda *args: None
        original = core.transfers.make

        def blind(*args: Any) -> Any:
            incoming = original(*args)

            class Agreeing(bytes):
                __hash__ = bytes.__hash__

                def __eq__(self, other: object) -> bool:
                    return True

            incoming.__class__ = type(
                "Blind", (type(incoming),), {"checksum": property(lambda self: Agreeing())}
            )
            return incoming

        core.transfers.make = blind

    outcomes = await suite("decode", config, build_decode, spoil)
    assert outcomes["P-36 damaged deliveries are refused"].result == "failed"


async def test_a_prefill_engine_whose_chunks_change_the_answer_fails():
    config = PrefillConfig(num_blocks=200, model=SMALL, runtime=RUNTIME)

    def spoil(core: Any) -> None:
        runner = core.ranks[0].runner
        prefill = runner.prefill

        async def wrong(batch: Any) -> Any:
            result = await prefill(batch)
            for row in batch.rows:
                if row.last and row.start > 0 and row.seq_id in result.first:
                    token = result.first[row.seq_id]
                    result.first[row.seq_id] = type(token)(token.token_id + 1)
            return result

        runner.prefill = wrong

    outcomes = await suite("prefill", config, build_prefill, spoil)
    assert outcomes["T5 chunked = unchunked"].result == "failed"
    assert outcomes["describes itself"].result == "passed"


async def test_an_engine_of_another_layout_is_not_driven_where_bytes_are_needed():
    config = DecodeConfig(num_blocks=100, model=SMALL, runtime=RUNTIME)

    async def build(runtime: Any) -> Any:
        core = await build_decode(runtime)
        return core

    def spoil(core: Any) -> None:
        object.__setattr__(core.layout, "weights_id", "other")
        core.layout.__dict__.pop("signature", None)  # it is computed once

    outcomes = await suite("decode", config, build, spoil)
    name = "T8 a delivered sequence goes on without gap or repeat"
    assert outcomes[name].result == "not driven"
