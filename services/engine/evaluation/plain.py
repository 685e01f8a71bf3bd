"""The network alone: one runner, no service, no cache, nothing moved. What the stack must equal."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from services.engine.evaluation.tokens import Output
from services.engine.model.serve import layout_of, runner_of
from services.engine.model.settings import TorchConfig
from services.engine.requests import Sampling, TokenOut, Tokens
from services.engine.runner import DecodeBatch, DecodeRow, PrefillBatch, PrefillRow, Start

_MODEL_ID = "plain"
_SEQ = 1


class PlainRun:
    """One device, one sequence at a time, greedy, without drafts."""

    def __init__(self, settings: TorchConfig, num_blocks: int = 600) -> None:
        self._layout = layout_of(settings, _MODEL_ID)
        self._runner = runner_of(settings, self._layout, num_blocks, for_prefill=True)
        self._size = self._layout.geometry.block_tokens

    def close(self) -> None:
        """Ends the runner's thread."""
        self._runner.shut_down()

    def cold(self, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> Output:
        """Returns the answer to a prompt computed from its first token on."""
        return self.behind(prompt, (), max_tokens, stop_ids)[0]

    def replayed(
        self, prompt: Sequence[int], stored: int, max_tokens: int, stop_ids: Sequence[int]
    ) -> Output:
        """Returns the answer behind a hit of `stored` tokens of its own cold run."""
        blocks = self.behind(prompt, (), 1, stop_ids)[1][: stored // self._size]
        return self.behind(prompt, blocks, max_tokens, stop_ids)[0]

    def behind(
        self,
        prompt: Sequence[int],
        blocks: Sequence[bytes],
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> tuple[Output, list[bytes]]:
        """Returns the answer behind a hit without a window state, and the prompt's full blocks.

        The last block of the hit is computed again over bounded windows and its stored KV is
        kept, as an engine does (engine.md, 1.8).
        """
        return asyncio.run(self._answer(prompt, blocks, max_tokens, stop_ids))

    async def _answer(
        self,
        prompt: Sequence[int],
        blocks: Sequence[bytes],
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> tuple[Output, list[bytes]]:
        stored = len(blocks) * self._size
        start = max(0, stored - self._size)
        table = self._table(len(prompt))
        self._open(prompt, stop_ids)
        for block, data in zip(table, blocks, strict=False):
            self._runner.write_block(block, data)
        said = [await self._prefill(prompt, start, stored)]
        full = [self._runner.read_block(block) for block in table[: len(prompt) // self._size]]
        while len(said) < max_tokens and said[-1].token_id not in stop_ids:
            said.append(await self._step(len(prompt) + len(said) - 1))
        self._runner.close(_SEQ)
        kept = [out for out in said if out.token_id not in stop_ids]
        output = Output(
            tuple(out.token_id for out in kept),
            tuple(out.logprob for out in kept),
            cached_tokens=start,
            replayed_tokens=stored - start,
        )
        return output, full

    def _open(self, prompt: Sequence[int], stop_ids: Sequence[int]) -> None:
        tokens = Tokens(self._layout.geometry, array("I", prompt))
        sampling = Sampling(max_tokens=1 << 20, stop_token_ids=frozenset(stop_ids), logprobs=True)
        num = len(prompt)
        self._runner.open(Start(_SEQ, "plain", tokens, sampling, num, num, _SEQ))

    def _table(self, num_tokens: int) -> tuple[int, ...]:
        count = self._layout.geometry.num_blocks(num_tokens)
        if count >= self._runner.pool.num_blocks:
            raise ValueError(f"{num_tokens} tokens need {count} blocks")
        return tuple(range(1, 1 + count))

    async def _prefill(self, prompt: Sequence[int], start: int, write_from: int) -> TokenOut:
        row = PrefillRow(
            seq_id=_SEQ,
            start=start,
            num_tokens=len(prompt) - start,
            valid_start=start,
            write_from=write_from,
            last=True,
            block_table=self._table(len(prompt)),
        )
        result = await self._runner.prefill(PrefillBatch((row,)))
        return result.first[_SEQ]

    async def _step(self, num_cached: int) -> TokenOut:
        table = self._table(num_cached + 2 * self._layout.geometry.back)
        step = self._runner.launch(DecodeBatch((DecodeRow(_SEQ, -1, num_cached, table, 1),), 1))
        self._runner.sample(step, {})
        result = await self._runner.result(step)
        return result.outputs[_SEQ].tokens[0]
