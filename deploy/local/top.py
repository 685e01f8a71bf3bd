"""`pelagos top`: the status table, live, until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy.local.stack import read_state
from deploy.local.status import look, render
from deploy.local.up import default_folder

_EVERY_S: Final = 1.0
_CLEAR: Final = "\x1b[H\x1b[2J"
_USAGE: Final = "usage: pelagos top [FOLDER] [--once]"


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the table every second. 0: ended by Ctrl-C; 3: nothing runs (any more)."""
    args = list(argv or ())
    if "--help" in args or "-h" in args:
        print(_USAGE)
        return 0
    folders = [arg for arg in args if not arg.startswith("-")]
    if len(folders) > 1 or any(arg.startswith("-") and arg != "--once" for arg in args):
        print(_USAGE, file=sys.stderr)
        return 2
    folder = Path(folders[0]) if folders else default_folder()
    try:
        return asyncio.run(_show(folder, once="--once" in args))
    except KeyboardInterrupt:
        return 0


async def _show(folder: Path, once: bool) -> int:
    while True:
        state = read_state(folder)
        if state is None:
            print(f"no stack is running in {folder}", file=sys.stderr)
            return 3
        text = render(await look(state))
        print(text if once else f"{_CLEAR}{text}\n\nCtrl-C leaves", flush=True)
        if once:
            return 0
        await asyncio.sleep(_EVERY_S)
