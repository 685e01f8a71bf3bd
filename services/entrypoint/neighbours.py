"""The services a request passes on its way to an engine, as the pipeline sees them.

Each is a small protocol with one gRPC implementation; tests put fakes behind the same stubs. Where
an instance is comes from `Peers`: fixed addresses from the configuration, else the cluster view.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from pelagos.kvstore.v1 import check_pb2, check_pb2_grpc
from pelagos.recipe.v1 import recipe_pb2 as recipe
from pelagos.recipe.v1 import recipe_pb2_grpc
from pelagos.so_compiler.v1 import so_compiler_pb2, so_compiler_pb2_grpc

from services.common.call import Call, calling
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call, stream_call
from services.entrypoint.client_left import as_ours
from services.entrypoint.connecting import connect

CHECK_TIMEOUT_S: Final = 0.5  # a slow cache look-up is a miss
ENCODE_TIMEOUT_S: Final = 30.0
COMPILE_TIMEOUT_S: Final = 8.0
# What another instance may answer; everything else is the answer.
_ASK_ANOTHER: Final = (Reason.BACKEND_LOST, Reason.DRAINING, Reason.NO_INSTANCE)
_FIRST_CODEC_WAIT_S: Final = 0.02
_MAX_CODEC_WAIT_S: Final = 0.5
PREFILL_LB: Final = "prefill-lb"


class Peers:
    """Addresses of neighbours: the one fixed in the configuration, else a ready member."""

    def __init__(
        self,
        view: ClusterView,
        machine: str,
        fixed: dict[str, str],
        rng: random.Random,
    ) -> None:
        self._view = view
        self._machine = machine
        self._fixed = {role: address for role, address in fixed.items() if address}
        self._rng = rng

    def address(self, role: str) -> str:
        """Returns where a role is served, on this machine if possible.

        Raises: Failure(NO_INSTANCE).
        """
        if role in self._fixed:
            return self._fixed[role]
        members = self._view.members(role)
        near = [m for m in members if m.labels.get("machine") == self._machine]
        if near:
            return self._rng.choice(near).address
        return self._view.pick(role, self._rng).address

    def others(self, role: str, address: str) -> list[str]:
        """Returns the other places that serve a role, in random order."""
        found = [m.address for m in self._view.members(role) if m.address != address]
        self._rng.shuffle(found)
        return found

    def leader(self, service: str) -> str:
        """Returns the address of a service's leader. Raises Failure(NO_INSTANCE)."""
        if service in self._fixed:
            return self._fixed[service]
        leader = self._view.leader(service)
        if leader is None:
            raise Failure(
                Reason.NO_INSTANCE, f"{service} has no leader", {"service": service}, 0.25
            )
        return leader.address


class Codec(Protocol):
    """services/recipe, in another process or in this one."""

    async def encode(self, request: recipe.EncodeRequest) -> recipe.EncodeResponse:
        """Converts, renders and encodes. Raises the codec's Failure with the API's body."""
        ...

    async def count_tokens(self, request: recipe.CountTokensRequest) -> recipe.CountTokensResponse:
        """Counts."""
        ...

    async def list_models(self) -> Sequence[recipe.Model]:
        """Lists what the codec knows."""
        ...

    async def run(
        self,
        next_batch: Callable[[], asyncio.Future[Sequence[recipe.ParseItem]]],
        on_results: Callable[[Sequence[recipe.ParseResult]], None],
    ) -> None:
        """Parses output streams, see `parse_mux.ParseLink`."""
        ...


class RecipeService:
    """The codec as a service. Encoding is pure, so a lost instance is asked again elsewhere."""

    def __init__(
        self,
        channels: Channels,
        peers: Peers,
        wait_s: float = 3.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._channels = channels
        self._peers = peers
        self._wait_s = wait_s  # how long a call waits while no codec answers
        self._clock = clock
        self._failed = ""  # where the last Parse call broke before it gave anything

    async def encode(self, request: recipe.EncodeRequest) -> recipe.EncodeResponse:
        """Converts, renders and encodes."""
        response: recipe.EncodeResponse = await self._call("Encode", request)
        return response

    async def count_tokens(self, request: recipe.CountTokensRequest) -> recipe.CountTokensResponse:
        """Counts."""
        response: recipe.CountTokensResponse = await self._call("CountTokens", request)
        return response

    async def list_models(self) -> Sequence[recipe.Model]:
        """Lists what the codec knows."""
        response = await self._call("ListModels", recipe.ListModelsRequest())
        return list(response.models)

    async def run(
        self,
        next_batch: Callable[[], asyncio.Future[Sequence[recipe.ParseItem]]],
        on_results: Callable[[Sequence[recipe.ParseResult]], None],
    ) -> None:
        """Carries batches over one call until it breaks."""
        address = self._peers.address("recipe")
        if address == self._failed:
            address = next(iter(self._peers.others("recipe", address)), address)
        self._failed = address  # until it has answered
        await connect(self._channels, address)
        with calling(Call()):
            async with stream_call(self._stub(address).Parse) as stream:
                writer = asyncio.ensure_future(_write_batches(stream, next_batch))
                try:
                    while (response := await stream.read()) is not None:
                        self._failed = ""
                        on_results(response.results)
                finally:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)

    async def _call(self, method: str, request: Any) -> Any:
        """Asks one instance after another until one answers; waits a little for the first."""
        failed = ""
        wait_s = _FIRST_CODEC_WAIT_S
        give_up_s = self._clock.now_s() + self._wait_s
        while True:
            try:
                address = self._peers.address("recipe")
                if address == failed:
                    address = next(iter(self._peers.others("recipe", failed)), failed)
                failed = address
                return await self._call_at(address, method, request)
            except Failure as error:
                failure = as_ours(error)
                if failure.reason not in _ASK_ANOTHER or self._clock.now_s() >= give_up_s:
                    raise failure from None
            await self._clock.sleep(wait_s)
            wait_s = min(_MAX_CODEC_WAIT_S, 2 * wait_s)

    async def _call_at(self, address: str, method: str, request: Any) -> Any:
        stub = self._stub(address)
        return await call(getattr(stub, method), request, timeout_s=ENCODE_TIMEOUT_S)

    def _stub(self, address: str) -> Any:
        return recipe_pb2_grpc.RecipeServiceStub(self._channels.get(address))


async def _write_batches(
    stream: Any, next_batch: Callable[[], asyncio.Future[Sequence[recipe.ParseItem]]]
) -> None:
    while True:
        await stream.write(recipe.ParseRequest(items=await next_batch()))


class Check(Protocol):
    """The kvcache-store's CHECK role."""

    async def match(self, request: check_pb2.MatchRequest) -> check_pb2.MatchResponse | None:
        """Returns what is cached; None when CHECK cannot say, which is a miss."""
        ...


class CheckService:
    """CHECK over gRPC. It never fails a request: doubt is a miss (P-37)."""

    def __init__(self, channels: Channels, peers: Peers) -> None:
        self._channels = channels
        self._peers = peers

    async def match(self, request: check_pb2.MatchRequest) -> check_pb2.MatchResponse | None:
        """Returns what is cached, None for a miss because CHECK is away or slow."""
        try:
            stub = check_pb2_grpc.CheckServiceStub(self._channels.get(self._peers.address("check")))
            response: check_pb2.MatchResponse = await call(
                stub.Match, request, timeout_s=CHECK_TIMEOUT_S
            )
            return response
        except Failure as failure:
            if failure.reason is Reason.INVALID_REQUEST:
                raise
            return None


class Compiler(Protocol):
    """The SO compiler."""

    async def compile(
        self, request: so_compiler_pb2.CompileRequest
    ) -> tuple[so_compiler_pb2.CompileResponse, str]:
        """Returns the artifact and the address that holds it."""
        ...


class CompilerService:
    """The SO compiler over gRPC."""

    def __init__(self, channels: Channels, peers: Peers) -> None:
        self._channels = channels
        self._peers = peers

    async def compile(
        self, request: so_compiler_pb2.CompileRequest
    ) -> tuple[so_compiler_pb2.CompileResponse, str]:
        """Compiles at one instance, at another when that one is lost."""
        address = self._peers.address("so-compiler")
        try:
            return await self._compile_at(address, request), address
        except Failure as error:
            failure = as_ours(error)
            others = self._peers.others("so-compiler", address)
            if failure.reason not in (Reason.BACKEND_LOST, Reason.DRAINING) or not others:
                raise failure from None
            return await self._compile_at(others[0], request), others[0]

    async def _compile_at(
        self, address: str, request: so_compiler_pb2.CompileRequest
    ) -> so_compiler_pb2.CompileResponse:
        stub = so_compiler_pb2_grpc.SoCompilerServiceStub(self._channels.get(address))
        response: so_compiler_pb2.CompileResponse = await call(
            stub.Compile, request, timeout_s=COMPILE_TIMEOUT_S
        )
        return response
