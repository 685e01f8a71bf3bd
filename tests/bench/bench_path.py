"""The whole path measured from outside: each hop, first token, rates, CPU; beside a peer router.

    python -m tests.bench.bench_path [--out FILE|-] [--rounds N] [--seconds S] [--no-peer] ...

Starts stacks of its own on loopback (engine `sim`), a load client in its own process, and the peer
`sglang-router` in front of stub workers; rounds of all systems alternate. Writes the tables
between the marks of docs/performance.md. Ends everything it started; bounded to six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deploy.local.plan import StackConfig
from deploy.local.stack import Stack
from services.common.trace_cli import read_spans
from services.common.tracing import REQUEST_ID
from services.engine.sim.config import COST, CURVE_MS
from tests.bench import processes, rpc_hops
from tests.bench.hops import hops_of, is_complete
from tests.bench.load_client import LoadConfig, Seen
from tests.bench.path_report import PELAGOS, STUB, render, splice
from tests.bench.path_results import PathRow, Results, round_of, split_cost

MODEL: Final = "DeepSeek-V4.1-Flash"
DOCUMENT: Final = Path("docs/performance.md")
LIMIT_S: Final = 360.0
# Beyond this no further round is begun: the second stack and the ends still need their time.
ROUNDS_UNTIL_S: Final = 250.0
_SPANS_TIMEOUT_S: Final = 30.0
_NUM_WARM: Final = 5


@dataclass(frozen=True)
class BenchConfig:
    """How much is measured; the defaults take some four minutes on two cores."""

    num_engines: int = 2  # prefill and decode each
    num_requests: int = 40  # of each latency series
    num_calls: int = 200  # of each RPC
    hop_words: int = 600  # enough for whole blocks, so that the second time is a hit
    path_words: tuple[int, ...] = (250, 4000)
    path_tokens: int = 128
    time_scales: tuple[float, ...] = (0.0, 1.0)
    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 3
    seconds: float = 3.0  # of one round of one system
    load_words: int = 250
    load_tokens: int = 64
    idle_s: float = 2.0
    split_tokens: tuple[int, int] = (8, 200)  # output of the two loads that tell costs apart
    with_peer: bool = True
    seed: int = 1


class Bench:
    """One run. Everything found goes into `results`."""

    def __init__(self, config: BenchConfig, folder: Path) -> None:
        self.config = config
        self.results = Results()
        self._folder = folder
        self._started_s = time.monotonic()

    async def run(self) -> Results:
        """Measures everything. Raises: TimeoutError after six minutes."""
        self._begin_facts()
        async with asyncio.timeout(LIMIT_S):
            for index, scale in enumerate(self.config.time_scales):
                async with self._stack(f"stack-{index}", scale) as stack:
                    if index == 0:
                        await self._hops(stack)
                        await self._path(stack, scale)
                        await self._rates(stack)
                    else:
                        await self._path(stack, scale)
        self._end_facts()
        return self.results

    # ---- parts ---------------------------------------------------------------------------------

    async def _hops(self, stack: Stack) -> None:
        """The same prompts twice: what is stored the first time is a hit the second time."""
        config = self.config
        wanted = self._load(stack, num_requests=config.num_requests, prompt_words=config.hop_words)
        self._say("hops")
        for series in ("miss", "hit"):
            load = await processes.run_load(replace(wanted, id_prefix=f"bench-{series}"))
            good = self._good(load.requests)
            if series == "hit":
                good = [seen for seen in good if seen.cached_tokens]
            spans = await _spans_of(stack, good)
            found: dict[str, list[float]] = {}
            for seen in good:
                for name, took_ms in hops_of(spans[seen.request_id], seen).items():
                    found.setdefault(name, []).append(took_ms)
            self.results.hops[f"{series} (n = {len(good)})"] = found
        self._say("single RPCs")
        self.results.rpcs = await rpc_hops.measure(stack, wanted, config.num_calls)

    async def _path(self, stack: Stack, scale: float) -> None:
        config = self.config
        for words in config.path_words:
            self._say(f"through the path, time_scale {scale:g}, {words} words")
            load = await processes.run_load(
                self._load(
                    stack,
                    num_requests=config.num_requests // 2,
                    prompt_words=words,
                    max_tokens=min(words, config.path_tokens),
                    seed=config.seed + 1000 + words,
                )
            )
            good = self._good(load.requests)
            if not good:
                continue
            num_prompt = await _num_prompt_tokens(stack, good)
            prefill_ms = (COST.step0_ns + COST.cost(num_prompt, 0)) / 1e6
            self.results.paths.append(
                PathRow(
                    scale,
                    num_prompt,
                    good[0].output_tokens,
                    scale * prefill_ms,
                    scale * CURVE_MS[0],
                    good,
                )
            )

    async def _rates(self, stack: Stack) -> None:
        config = self.config
        ours = processes.stack_target(stack, MODEL)
        before = processes.cpu_by_role(ours.pids)
        started_s = time.monotonic()
        await asyncio.sleep(config.idle_s)
        idle_s = time.monotonic() - started_s
        self.results.idle_cores = {
            role: (used - before[role]) / idle_s
            for role, used in processes.cpu_by_role(ours.pids).items()
        }
        paths = self.results.paths
        tokens_per_event = max(1, round(paths[0].tokens_per_event())) if paths else 1
        async with contextlib.AsyncExitStack() as peers:
            stubs = await peers.enter_async_context(
                processes.stub_workers(config.num_engines, tokens_per_event)
            )
            systems = [ours, replace(stubs[0], name=STUB)]
            if config.with_peer:
                self._say("the peer router")
                try:
                    program = await processes.install_router()
                    router = processes.router(program, stubs, self._folder)
                    systems.insert(1, await peers.enter_async_context(router))
                except processes.PeerMissing as missing:
                    self.results.peer = f"No peer in this run: {missing}."
                    self._say(self.results.peer)
            else:
                self.results.peer = "No peer in this run: it was left out by a flag."
            if not self.results.peer:
                self.results.peer = (
                    f"Beside `{processes.ROUTER}` with its default policy in front of "
                    f"{config.num_engines} stub workers, which stream {tokens_per_event} "
                    f"token(s) per event. Prompts of about {config.load_words} tokens, all "
                    f"different; {config.load_tokens} tokens of output; {config.seconds:g} s per "
                    "system and round, systems in turn within a round."
                )
            await self._all_rounds(systems)
            self._say("CPU of a request and of a token")
            for system in systems:
                if system.name != STUB:
                    self.results.split[system.name] = await self._split(system)

    async def _all_rounds(self, systems: Sequence[processes.Target]) -> None:
        config = self.config
        for number in range(config.rounds + 1):  # round 0 warms up
            if number > 1 and time.monotonic() - self._started_s > ROUNDS_UNTIL_S:
                self._say(f"stopped after {number - 1} rounds: the time is up")
                return
            self._say(f"round {number} of {config.rounds}")
            for concurrency in config.concurrencies if number else config.concurrencies[-1:]:
                for system in systems:
                    await self._round(system, number, concurrency)

    async def _round(self, system: processes.Target, number: int, concurrency: int) -> None:
        config = self.config
        seconds = config.seconds if number else config.seconds / 2
        wanted = LoadConfig(
            system.address,
            key=system.key,
            model=system.model,
            concurrency=concurrency,
            seconds=seconds,
            prompt_words=config.load_words,
            max_tokens=config.load_tokens,
            seed=config.seed + 10_000 * (number + 1) + concurrency,
            id_prefix=f"bench-{number}-{concurrency}",
        )
        cpu_before = processes.cpu_by_role(system.pids)
        machine_before = processes.machine_cpu_s()
        load = await processes.run_load(wanted)
        machine_after = processes.machine_cpu_s()
        cpu = {
            role: used - cpu_before[role]
            for role, used in processes.cpu_by_role(system.pids).items()
        }
        self._good(load.requests, system.name)
        if number:
            self.results.rounds.append(
                round_of(
                    system.name,
                    number,
                    concurrency,
                    seconds,
                    load,
                    cpu,
                    machine_after[0] - machine_before[0],
                    machine_after[1] - machine_before[1],
                )
            )

    async def _split(self, system: processes.Target) -> dict[str, tuple[float, float]]:
        """Returns CPU µs by role: of a request, and of each token beyond."""
        config = self.config
        costs: list[dict[str, float]] = []
        tokens: list[int] = []
        for max_tokens in config.split_tokens:
            before = processes.cpu_by_role(system.pids)
            load = await processes.run_load(
                LoadConfig(
                    system.address,
                    key=system.key,
                    model=system.model,
                    concurrency=max(1, max(config.concurrencies) // 2),
                    num_requests=4 * config.num_requests,
                    prompt_words=config.load_words,
                    max_tokens=max_tokens,
                    seed=config.seed + 500_000 + max_tokens,
                    id_prefix=f"bench-split-{max_tokens}",
                )
            )
            after = processes.cpu_by_role(system.pids)
            num = max(1, len(self._good(load.requests, system.name)))
            costs.append({role: 1e6 * (after[role] - before[role]) / num for role in after})
            tokens.append(max_tokens)
        return split_cost(costs[0], costs[1], tokens[0], tokens[1])

    # ---- inside --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _stack(self, name: str, scale: float) -> AsyncIterator[Stack]:
        config = self.config
        self._say(f"a stack with time_scale {scale:g}")
        flags = [f"--model.sim.time_scale={scale:g}"]
        wanted = StackConfig(
            folder=self._folder / name,
            num_prefill=config.num_engines,
            num_decode=config.num_engines,
            num_entrypoints=1,
            flags={"prefill": flags, "decode": flags},
        )
        async with Stack(wanted).running() as stack:
            # First requests pay for imports and connections.
            warm = self._load(stack, num_requests=_NUM_WARM, seed=config.seed + 999)
            self._good((await processes.run_load(replace(warm, id_prefix="warm"))).requests)
            yield stack

    def _load(self, stack: Stack, **more: object) -> LoadConfig:
        config = self.config
        settings: dict[str, object] = {
            "address": stack.http_addresses[0],
            "key": stack.api_key,
            "model": MODEL,
            "prompt_words": config.load_words,
            "max_tokens": config.load_tokens,
            "seed": config.seed,
            **more,
        }
        settings.setdefault("id_prefix", f"bench-{settings['seed']}")
        return LoadConfig(**settings)  # type: ignore[arg-type]

    def _good(self, requests: Sequence[Seen], system: str = PELAGOS) -> list[Seen]:
        """Returns what succeeded; the rest is reported."""
        for seen in requests:
            if seen.error:
                self.results.errors.append(
                    f"{system}: {seen.request_id}: {seen.status} {seen.error}"
                )
        return [seen for seen in requests if not seen.error]

    def _begin_facts(self) -> None:
        config = self.config
        self.results.facts = {
            "command": f"`make bench-path` (`python -m tests.bench.bench_path"
            f"{''.join(' ' + shlex.quote(arg) for arg in sys.argv[1:])}`)",
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": _commit(),
            "machine": f"{_cpu_model()}, {os.cpu_count()} cores, "
            f"{_memory_gib():.0f} GiB, Linux {platform.release().split('-')[0]}, no GPU",
            "software": f"Python {platform.python_version()}, engine `sim` in mode echo",
            "stack": f"1 entrypoint, {config.num_engines} prefill, {config.num_engines} decode, "
            "one of every other service, all on loopback, traces exported to files",
            "seed": str(config.seed),
            "load of the machine before": _load_average(),
        }

    def _end_facts(self) -> None:
        others = [one.others for one in self.results.rounds]
        if others:
            share = sorted(others)[len(others) // 2]
            self.results.facts["CPU taken by other programs during the rounds"] = (
                f"{100 * share:.0f} % of the machine (median; "
                f"{100 * min(others):.0f}–{100 * max(others):.0f} %)"
            )
        self.results.facts["duration"] = f"{time.monotonic() - self._started_s:.0f} s"

    def _say(self, text: str) -> None:
        took_s = time.monotonic() - self._started_s
        print(f"bench-path {took_s:5.0f} s: {text}", file=sys.stderr, flush=True)


async def _spans_of(stack: Stack, requests: Sequence[Seen]) -> dict[str, list[dict[str, object]]]:
    """Returns the spans by request id, once the last ones have been exported.

    Raises: TimeoutError.
    """
    wanted = {seen.request_id for seen in requests}
    async with asyncio.timeout(_SPANS_TIMEOUT_S):
        while True:
            found: dict[str, list[dict[str, object]]] = {name: [] for name in wanted}
            for span in read_spans(stack.folder / "traces"):
                request_id = span.get("attributes", {}).get(REQUEST_ID)
                if request_id in wanted:
                    found[request_id].append(span)
            if all(is_complete(spans) for spans in found.values()):
                break
            await asyncio.sleep(0.3)
    for spans in found.values():
        spans.sort(key=lambda span: span["start_ns"])  # type: ignore[arg-type,return-value]
    return found


async def _num_prompt_tokens(stack: Stack, requests: Sequence[Seen]) -> int:
    spans = (await _spans_of(stack, requests[:1]))[requests[0].request_id]
    [found] = [span for span in spans if span["name"] == "prefill.request"][:1]
    return int(found["attributes"]["num_tokens"])  # type: ignore[index]


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + (" (with local changes)" if changed else "")


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _load_average() -> str:
    return " / ".join(f"{value:.1f}" for value in os.getloadavg()) + " (1, 5, 15 minutes)"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes. 0: done; 1: some request failed (what was measured is written)."""
    default = BenchConfig()
    parser = argparse.ArgumentParser(prog="bench_path", description=__doc__)
    parser.add_argument("--out", default=str(DOCUMENT), help="document with the marks; - prints")
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--seconds", type=float, default=default.seconds)
    parser.add_argument("--requests", type=int, default=default.num_requests)
    parser.add_argument("--calls", type=int, default=default.num_calls)
    parser.add_argument("--engines", type=int, default=default.num_engines)
    parser.add_argument("--concurrency", type=_numbers, default=default.concurrencies)
    parser.add_argument("--path-words", type=_numbers, default=default.path_words)
    parser.add_argument("--time-scales", type=_floats, default=default.time_scales)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--no-peer", action="store_true", help="without the peer router")
    args = parser.parse_args(argv)
    config = BenchConfig(
        num_engines=args.engines,
        num_requests=args.requests,
        num_calls=args.calls,
        path_words=args.path_words,
        time_scales=args.time_scales,
        concurrencies=args.concurrency,
        rounds=args.rounds,
        seconds=args.seconds,
        with_peer=not args.no_peer,
        seed=args.seed,
    )
    with tempfile.TemporaryDirectory(prefix="pelagos-bench-") as folder:
        results = asyncio.run(Bench(config, Path(folder)).run())
    text = render(results)
    if args.out == "-":
        print(text)
    else:
        path = Path(args.out)
        path.write_text(splice(path.read_text(encoding="utf-8"), text), encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)
    for error in results.errors[:20]:
        print(f"failed: {error}", file=sys.stderr)
    return 1 if results.errors else 0


if __name__ == "__main__":
    sys.exit(main())
