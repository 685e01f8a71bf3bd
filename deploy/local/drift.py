"""`pelagos eval --drift` and `--faults`: log-probabilities through the stack, and faults in it."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.running import stack_for
from services.engine.evaluation import probes
from services.engine.evaluation.drift import MAX_TOKENS, STOP_IDS, Finding, Measuring
from services.engine.evaluation.drift_report import faults_table, guard_table, modes_table
from services.engine.evaluation.modes import Cache, Mode
from services.engine.evaluation.tokens import Output, TokenStack
from services.engine.model.faults import FAULTS
from services.engine.model.settings import TorchConfig
from services.engine.model.vocabulary import TOKENIZER


@dataclass
class Measured:
    """Tables by the name of their section, and whether every way stayed within the tolerance."""

    sections: dict[str, str] = field(default_factory=dict)
    agree: bool = True


async def measure(args: argparse.Namespace, modes: Sequence[Mode]) -> Measured:
    """Compares every way with the network alone; with `args.faults` puts faults in, too."""
    findings: list[Finding] = []
    faults: list[Finding] = []
    told = ""
    with tempfile.TemporaryDirectory(prefix="pelagos-drift-") as folder:
        file = Path(folder) / "fault"
        for ranks, num_decode in dict.fromkeys(mode.stack for mode in modes):
            ours = [mode for mode in modes if mode.stack == (ranks, num_decode)]
            with_faults = args.faults and (ranks, num_decode) == (1, 1) and args.folder is None
            flags = [f"--model.fault_file={file}"] if with_faults else []
            async with stack_for(args.folder, args.checkpoint, ranks, flags, num_decode) as address:
                if address is None:
                    continue
                async with TokenStack.opened(address) as tokens:
                    asked = await _probes(tokens, args.conversations)
                    plain = await asyncio.to_thread(_alone, args.checkpoint, asked)
                    right = await _num_right(tokens, asked, plain["cold"])
                    told = f"{len(asked)} probes, {right} answered right by the network alone."
                    measuring = Measuring(tokens, asked, f"drift-{secrets.token_hex(4)}")
                    for mode in ours:
                        way = "replay" if mode.cache is Cache.WITHOUT_WINDOW else "cold"
                        findings.append(await measuring.mode(mode, plain[way]))
                        _say(f"{mode.name}: {findings[-1].largest:.1e}")
                    if with_faults:
                        faults += await _faults(measuring, plain["cold"], file)
    measured = Measured(agree=all(found.num_moved + found.num_refused == 0 for found in findings))
    measured.sections["drift"] = f"{told}\n\n{modes_table(findings)}"
    for found in findings:
        if found.num_astray:
            _say(f"{found.name}: {found.num_astray} did not come the way that was asked for")
    if faults:
        texts = {name: fault.text for name, fault in FAULTS.items()}
        measured.sections["faults"] = f"{told}\n\n{faults_table(faults, texts)}"
    if args.faults:
        measured.sections["guard"] = await asyncio.to_thread(_guard, args.checkpoint)
    return measured


async def _probes(tokens: TokenStack, num_conversations: int) -> list[probes.Probe]:
    block, ring, _ = await tokens.geometry()
    return await probes.build(num_conversations, block, ring, tokens.prompt, tokens.ids_of)


def _alone(checkpoint: Path, asked: Sequence[probes.Probe]) -> dict[str, dict[str, Output]]:
    """Returns the network's own answers by way and probe: cold, and behind its own replay."""
    from services.engine.evaluation.plain import PlainRun  # torch is loaded when it is needed

    run = PlainRun(TorchConfig(checkpoint=str(checkpoint)))
    try:
        return {
            "cold": {p.name: run.cold(p.prompt, MAX_TOKENS, STOP_IDS) for p in asked},
            "replay": {
                p.name: run.replayed(p.prompt, p.position, MAX_TOKENS, STOP_IDS) for p in asked
            },
        }
    finally:
        run.close()


async def _num_right(
    tokens: TokenStack, asked: Sequence[probes.Probe], plain: dict[str, Output]
) -> int:
    texts = [await tokens.text_of(plain[probe.name].token_ids) for probe in asked]
    return sum(text == probe.expected for text, probe in zip(texts, asked, strict=True))


async def _faults(measuring: Measuring, expected: dict[str, Output], file: Path) -> list[Finding]:
    found = []
    for name, fault in FAULTS.items():
        at_hit = fault.block or fault.window or fault.reverses
        cache = Cache.WITH_WINDOW if at_hit else Cache.NOTHING
        found.append(await measuring.fault(name, cache, expected, file))
        _say(f"{name}: {found[-1].caught_by}")
    return found


def _guard(checkpoint: Path) -> str:
    """Returns the table of ten turns of replays, with the drift guard and without."""
    from services.engine.evaluation.guard import conversation, replayed_turns
    from services.engine.evaluation.plain import PlainRun

    settings = TorchConfig(checkpoint=str(checkpoint))
    shape, run = settings.geometry, PlainRun(settings)
    try:
        prompts = conversation(checkpoint / TOKENIZER, num_turns=10)
        with_guard, without = (
            replayed_turns(
                run,
                prompts,
                guarded=guarded,
                exact_turns=frozenset({4}),
                block=shape.block_tokens,
                ring=shape.ring,
            )
            for guarded in (True, False)
        )
    finally:
        run.close()
    return guard_table(with_guard, without)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
