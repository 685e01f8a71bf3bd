"""The token-level side of a running stack: prompts as ids, priming, output with log-probabilities.

Priming leaves exactly that in the store which a way of running needs: a prompt's blocks up to a
position are stored when a prefix of it has been run, and the window state is attached at the last
boundary before that prefix's last token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pelagos.engine.v1 import engine_control_pb2 as control
from pelagos.engine.v1 import engine_control_pb2_grpc as control_rpc
from pelagos.engine.v1 import records_pb2 as records
from pelagos.entrypoint.v1 import entrypoint_pb2 as pb
from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.common.errors import Failure
from services.common.rpc_client import Channels, call
from services.common.rpc_errors import from_proto
from services.decode.client import DecodeClient
from services.engine.evaluation.stack import StackAddress
from services.engine.requests import RequestKey
from services.entrypoint.client import EntrypointClient
from services.recipe.client import RecipeClient

_Answer = TypeVar("_Answer")

_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.002


@dataclass(frozen=True)
class Output:
    """Tokens of one run with their log-probabilities, and what of the prompt was not computed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int = 0
    replayed_tokens: int = 0
    finish: str = ""
    error: str = ""
    moved: bool = False  # to another decode engine while it was answered


class TokenStack:
    """One stack's codec, token-level API and engine controls."""

    def __init__(self, address: StackAddress, channels: Channels) -> None:
        self._address = address
        self._channels = channels
        self._recipe = RecipeClient(channels, address.processes["recipe"][0])
        self._entrypoint = EntrypointClient(
            channels, address.processes["entrypoint"][0], address.key
        )

    @staticmethod
    @asynccontextmanager
    async def opened(address: StackAddress) -> AsyncIterator[TokenStack]:
        """Opens channels for as long as the block."""
        channels = Channels()
        try:
            yield TokenStack(address, channels)
        finally:
            await channels.close()

    async def prompt(self, body: Mapping[str, Any]) -> array[int]:
        """Returns a chat request's prompt in ids. Raises: Failure."""
        request = recipe.EncodeRequest(
            protocol=recipe.PROTOCOL_CHAT,
            body=json.dumps({**body, "model": self._address.model}).encode(),
        )
        return array("I", (await self._recipe.encode(request)).token_ids)

    async def ids_of(self, text: str) -> array[int]:
        """Returns plain text in ids of the model's vocabulary. Raises: Failure."""
        request = recipe.TokenizeRequest(text=text, tokenizer=self._address.model)
        return array("I", (await self._recipe.tokenize(request)).token_ids)

    async def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. Raises: Failure."""
        request = recipe.DetokenizeRequest(
            token_ids=array("I", ids).tobytes(), tokenizer=self._address.model
        )
        return (await self._recipe.detokenize(request)).text

    async def run(
        self,
        prompt: Sequence[int],
        *,
        salt: str,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
        request_id: str = "",
    ) -> Output:
        """Runs ids greedily. A failure after the first token is the output's `error`.

        Raises: Failure before the first token.
        """
        request = pb.GenerateRequest(
            prompt_tokens=struct.pack(f"<{len(prompt)}I", *prompt),
            sampling=records.Sampling(
                max_tokens=max_tokens, logprobs=True, stop_token_ids=list(stop_ids)
            ),
            model=self._address.model,
            cache_salt=salt,
            request_id=request_id,
        )
        ids: list[int] = []
        logprobs: list[float] = []
        usage, finish, error = records.Usage(), "", ""
        async with self._entrypoint.generate(request, timeout_s=_TIMEOUT_S) as output:
            async for event in output:
                if event.HasField("usage"):
                    usage = event.usage
                if event.HasField("tokens"):
                    ids += memoryview(event.tokens.token_ids).cast("I").tolist()
                    logprobs += memoryview(event.tokens.logprobs).cast("f").tolist()
                elif event.HasField("finished"):
                    finish = records.FinishReason.Name(event.finished.reason)
                elif event.HasField("failed"):
                    error = str(from_proto(event.failed))
        return Output(
            tuple(ids),
            tuple(logprobs),
            usage.cached_tokens,
            usage.replayed_tokens,
            finish.removeprefix("FINISH_REASON_").lower(),
            error,
        )

    async def prime(self, prompt: Sequence[int], position: int, salt: str) -> None:
        """Has the blocks before `position` stored, with the window state there. Raises: Failure.

        Args:
            position: a block boundary before the prompt's last token.
        """
        await self.run(prompt[: position + 1], salt=salt, max_tokens=1)

    async def set_dspark(self, mode: str) -> None:
        """Sets the speculation of every decode engine. Raises: Failure."""
        request = control.ConfigureRequest(version=time.time_ns(), dspark_mode=mode)
        for address in self._address.processes["decode"]:
            stub = control_rpc.EngineControlServiceStub(self._channels.get(address))
            await call(stub.Configure, request, timeout_s=10)

    async def moving(
        self, request_id: str, work: Coroutine[Any, Any, _Answer]
    ) -> tuple[_Answer, bool]:
        """Moves a request to another decode engine while `work` waits for its answer.

        Returns the answer, and whether it was moved: a short one may end first.
        """
        mover = asyncio.create_task(self._move(request_id))
        try:
            answer = await work
        finally:
            mover.cancel()
            await asyncio.wait([mover])
        return answer, not mover.cancelled() and mover.exception() is None

    async def _move(self, request_id: str) -> None:
        """Returns when the request has been moved; asks until it decodes somewhere."""
        decodes = self._address.processes["decode"]
        client, key = DecodeClient(self._channels), RequestKey(request_id)
        for source, target in itertools.cycle(zip(decodes, decodes[1:] + decodes[:1], strict=True)):
            try:
                if await client.export(source, key, target) is not None:
                    return
            except Failure:
                await asyncio.sleep(_POLL_S)

    async def geometry(self) -> tuple[int, int, int]:
        """Returns tokens of a block, of a ring, and of a longest sequence. Raises: Failure."""
        address = self._address.processes["prefill"][0]
        stub = control_rpc.EngineControlServiceStub(self._channels.get(address))
        found = await call(stub.Describe, control.DescribeRequest(), timeout_s=10)
        layout = found.kv_layout
        return layout.block_tokens, layout.ring_tokens, found.max_model_len


async def until_stored(
    probe: Callable[[], Awaitable[_Answer]],
    is_stored: Callable[[_Answer], bool],
    tries: int = 40,
) -> _Answer:
    """Repeats a probe until what was put shows, which is soon; returns the last answer.

    Puts are acknowledged to nobody who asks, and the index behind CHECK follows the store's.
    """
    answer = await probe()
    for number in range(tries):
        if is_stored(answer):
            break
        await asyncio.sleep(min(1.0, 0.05 * (number + 1)))
        answer = await probe()
    return answer
