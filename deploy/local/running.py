"""A stack for a command that asks one: the one that runs in a folder, or one of its own."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from deploy.local.plan import StackConfig
from deploy.local.stack import Stack, read_state
from services.engine.evaluation.stack import StackAddress


@contextlib.asynccontextmanager
async def stack_for(
    folder: Path | None,
    checkpoint: Path,
    expert_ranks: int,
    flags: Sequence[str] = (),
    num_decode: int = 1,
) -> AsyncIterator[StackAddress | None]:
    """Yields the stack that runs in the folder, or one of our own for as long as the block.

    None when the one that runs has another number of expert ranks, or fewer decode engines.
    Args:
        flags: of prefill and decode engines of our own.
    Raises: StartFailed and what else a start may; ValueError when none runs in the folder.
    """
    if folder is not None:
        state = read_state(folder)
        if state is None:
            raise ValueError(f"no stack runs in {folder}")
        address = StackAddress.of_state(state)
        fits = state.get("expert_ranks", 1) == expert_ranks
        fits = fits and len(address.processes["decode"]) >= num_decode
        yield address if fits else None
        return
    with tempfile.TemporaryDirectory(prefix="pelagos-eval-") as own:
        config = StackConfig(
            folder=Path(own) / "stack",
            engine="torch",
            checkpoint=checkpoint,
            expert_ranks=expert_ranks,
            num_encoders=0,
            num_entrypoints=1,
            num_decode=num_decode,
            flags={"prefill": list(flags), "decode": list(flags)},
        )
        _say(f"starting a stack, experts on {expert_ranks} rank{'s' * (expert_ranks > 1)}")
        async with Stack(config).running() as stack:
            yield StackAddress.of_state(_state_of(stack))


def _state_of(stack: Stack) -> Any:
    return json.loads((stack.folder / "state.json").read_text(encoding="utf-8"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
