"""Background tasks of single requests: one that fails ends its request, never the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class TaskSet:
    """Holds on to tasks until they end; what they raise is logged, or given to `on_error`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self,
        coroutine: Coroutine[Any, Any, Any],
        name: str,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if finished.cancelled() or finished.exception() is None:
                return
            error = finished.exception()
            assert error is not None
            if on_error is not None:
                on_error(error)
            else:
                log.error("a background task failed", exc_info=error, extra={"task": name})

        task.add_done_callback(done)
        return task

    async def close(self) -> None:
        """Cancels everything and waits for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
