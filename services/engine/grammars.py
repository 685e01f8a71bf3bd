"""Fetches compiled grammars and makes the constraints of requests out of them.

Prefill and decode each fetch for themselves: a hand-off carries the artifact's name, and the
receiver replays the output so far. Source: engine.md, sections 5.1 and 5.5.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.engine.grammar import Constraint, GrammarLibrary, Matcher
from services.engine.requests import Sampling, u32_array
from services.so_compiler.client import SoCompiler

COMPILER_ROLE = "so-compiler"
_MAX_LOADED = 256


class Grammars:
    """Loaded artifacts by name, the longest unused dropped first."""

    def __init__(
        self,
        library: GrammarLibrary,
        compiler: SoCompiler,
        view: ClusterView | None,
        rng: random.Random,
    ) -> None:
        self._library = library
        self._compiler = compiler
        self._view = view
        self._rng = rng
        self._loaded: OrderedDict[str, Callable[[], Matcher]] = OrderedDict()

    @property
    def available(self) -> bool:
        """Whether this engine can constrain output at all."""
        return self._library.available

    async def constraint(
        self, grammar: pb.GrammarRef, sampling: Sampling, said: Sequence[int]
    ) -> Constraint:
        """The constraint of a request, with its output so far replayed; it may be dead then.

        Raises: Failure, NOT_FOUND when the artifact was evicted.
        """
        make = self._loaded.get(grammar.artifact_key)
        if make is None:
            found = await self._compiler.fetch(self._address(grammar), grammar.artifact_key)
            # Loading compiles the grammar's automata: not on the event loop.
            make = await asyncio.to_thread(
                self._library.load, found.backend, found.tokenizer_id, found.data
            )
            self._loaded[grammar.artifact_key] = make
            while len(self._loaded) > _MAX_LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(grammar.artifact_key)
        constraint = Constraint(
            make(),
            trigger=u32_array(grammar.trigger_token_ids),
            bound_token_id=grammar.bound_token_id,
            stop_ids=sampling.stop_token_ids,
            vocab_size=self._library.vocab_size,
        )
        for token_id in said:
            constraint.advance(token_id)
        return constraint

    def _address(self, grammar: pb.GrammarRef) -> str:
        if grammar.address:
            return grammar.address
        compilers = self._view.members(COMPILER_ROLE) if self._view is not None else ()
        if not compilers:
            raise Failure(Reason.NO_INSTANCE, "no grammar compiler is known", retry_after_s=1.0)
        return self._rng.choice(compilers).address
