"""`pelagos eval`: the held-out questions through the whole stack, in every way of running it.

Without a stack given it starts its own, one for each number of expert ranks; with `--folder` it
asks the one that runs there, in the ways that need no other stack.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.local import drift
from deploy.local.etcd import EtcdFailed, EtcdMissing
from deploy.local.model import ModelUnfit
from deploy.local.plan import MODELS
from deploy.local.process import StartFailed
from deploy.local.running import stack_for
from deploy.local.stack import StackRunning
from services.engine.evaluation.document import with_section
from services.engine.evaluation.modes import MODES, Mode, named
from services.engine.evaluation.questions import KINDS, pick
from services.engine.evaluation.report import scores_table, wrong_answers
from services.engine.evaluation.scoring import Asker, Scores
from services.engine.evaluation.stack import HttpStack
from services.engine.evaluation.tokens import TokenStack


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pelagos eval`. 0: every way agrees with the first; 1: one does not, or it failed."""
    parser = argparse.ArgumentParser(prog="pelagos eval", description=__doc__)
    parser.add_argument("--folder", type=Path, help="of a stack that runs; else one is started")
    parser.add_argument("--checkpoint", type=Path, default=MODELS / "pelagos-mini")
    parser.add_argument(
        "--modes", default="", help=f"comma-separated: {', '.join(m.name for m in MODES)}"
    )
    parser.add_argument("--per-kind", type=int, default=10, help="questions of each kind")
    parser.add_argument(
        "--kinds", default="", help=f"comma-separated, all unless given: {', '.join(KINDS)}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--tokens", type=int, default=700, help="of a conversation, about")
    parser.add_argument("--parallel", type=int, default=8, help="questions at a time")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument(
        "--drift", action="store_true", help="compares log-probabilities with the network alone"
    )
    parser.add_argument(
        "--faults", action="store_true", help="and puts faults into carried state, to see them"
    )
    parser.add_argument("--conversations", type=int, default=2, help="of probes, six in each")
    parser.add_argument("--write", type=Path, help="puts the tables into this document")
    parser.add_argument("--show-wrong", action="store_true", help="lists wrong answers")
    args = parser.parse_args(argv)
    try:
        modes = named(args.modes)
        if args.drift or args.faults:
            measured = asyncio.run(drift.measure(args, modes))
            for name, section in measured.sections.items():
                print(f"{section}\n")
                _write(args.write, name, section)
            return 0 if measured.agree else 1
        scores = asyncio.run(_score(args, modes))
    except (ValueError, ModelUnfit) as error:
        print(f"pelagos eval: {error}", file=sys.stderr)
        return 2
    except (StartFailed, StackRunning, EtcdMissing, EtcdFailed, OSError) as error:
        print(f"pelagos eval: {error}", file=sys.stderr)
        return 1
    told = f"{_conditions(args)}\n\n{scores_table(scores)}"
    print(told)
    _write(args.write, "scores", told)
    if args.show_wrong:
        print(f"\nwrong answers:\n{wrong_answers(scores)}")
    for text, count in scores.errors().items():
        print(f"{count} failed, {text}", file=sys.stderr)
    return 0 if _agree(scores) else 1


async def _score(args: argparse.Namespace, modes: Sequence[Mode]) -> Scores:
    kinds = tuple(kind.strip() for kind in args.kinds.split(",")) if args.kinds else KINDS
    asked = pick(args.per_kind, seed=args.seed, num_tokens=args.tokens, kinds=kinds)
    scores = Scores(asked)
    for ranks, num_decode in dict.fromkeys(mode.stack for mode in modes):
        ours = [mode for mode in modes if mode.stack == (ranks, num_decode)]
        async with stack_for(args.folder, args.checkpoint, ranks, num_decode=num_decode) as address:
            if address is None:
                _say(f"left out, for they need another stack: {', '.join(m.name for m in ours)}")
                continue
            async with TokenStack.opened(address) as tokens:
                asker = Asker(
                    HttpStack(address),
                    tokens,
                    f"eval-{secrets.token_hex(4)}",
                    parallel=args.parallel,
                    max_tokens=args.max_tokens,
                    on_answer=lambda mode, done: _progress(mode, done, len(asked)),
                )
                for mode in ours:
                    scores.by_mode[mode.name] = await asker.run(mode, asked)
    if not scores.by_mode:
        raise ValueError("no mode is left to ask this stack in")
    return scores


def _conditions(args: argparse.Namespace) -> str:
    return (
        f"`{args.checkpoint.name}`, {args.per_kind} questions of each kind, seed {args.seed}, "
        f"conversations of about {args.tokens} tokens, {args.parallel} at a time, on a CPU."
    )


def _write(document: Path | None, name: str, section: str) -> None:
    if document is not None:
        text = document.read_text(encoding="utf-8")
        document.write_text(with_section(text, name, section), encoding="utf-8")


def _agree(scores: Scores) -> bool:
    base = next(iter(scores.by_mode))
    return all(0 in scores.difference(base, mode)[1] for mode in scores.by_mode if mode != base)


def _progress(mode: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{mode}: {done} of {total}\x1b[K", end="", file=sys.stderr, flush=True)
    elif done == total:
        _say(f"{mode}: {total} asked")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
