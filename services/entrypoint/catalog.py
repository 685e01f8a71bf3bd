"""Which models can be asked for: what the codec knows, met with what the engines serve.

Engines describe themselves (`EngineControlService.Describe`); the description of each is asked for
once per life and kept while it is a member. From it come the identity under which the cache is
matched (model and weights, layout signature, block and ring size) and the longest sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from pelagos.engine.v1 import engine_control_pb2 as control
from pelagos.engine.v1 import engine_control_pb2_grpc
from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call

log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Profile:
    """One model as engines serve it."""

    model_id: str
    weights_id: str
    tokenizer_id: str
    layout_signature: str
    block_tokens: int
    ring_tokens: int
    max_model_len: int
    max_tokens_per_rank: int  # what the largest pool of blocks can hold

    @property
    def cache_model_id(self) -> str:
        """Returns the model id of cache keys: weights are part of it."""
        return f"{self.model_id}@{self.weights_id}" if self.weights_id else self.model_id

    def speaks(self, tokenizer_id: str) -> bool:
        """Returns whether ids of that tokenizer mean here what they mean there."""
        return not tokenizer_id or not self.tokenizer_id or tokenizer_id == self.tokenizer_id

    @property
    def layout_digest(self) -> bytes:
        """Returns the 32 bytes that stand for the layout in cache keys; empty when unknown."""
        if not self.layout_signature:
            return b""
        try:
            digest = bytes.fromhex(self.layout_signature)
        except ValueError:
            digest = b""
        if len(digest) == 32:
            return digest
        return sha256(self.layout_signature.encode()).digest()


def profile_of(description: control.DescribeResponse) -> Profile:
    """Returns the profile in an engine's description of itself."""
    layout = description.kv_layout
    block_tokens = layout.block_tokens or 128
    return Profile(
        model_id=description.model_id,
        weights_id=description.weights_id,
        tokenizer_id=description.tokenizer_id,
        layout_signature=description.layout_signature,
        block_tokens=block_tokens,
        ring_tokens=layout.ring_tokens or 134,
        max_model_len=description.max_model_len,
        max_tokens_per_rank=max((r.blocks * block_tokens for r in description.ranks), default=0),
    )


class Catalog:
    """The engines' profiles, kept current by `run`."""

    def __init__(
        self,
        view: ClusterView,
        channels: Channels,
        *,
        aliases: Mapping[str, str],
        fixed_engines: Sequence[str] = (),
    ) -> None:
        self._view = view
        self._channels = channels
        self._aliases = dict(aliases)
        self._fixed = tuple(fixed_engines)
        self._profiles: dict[tuple[str, str], Profile] = {}
        self._changed = asyncio.Event()

    @property
    def num_engines(self) -> int:
        """Returns how many engines are described."""
        return len(self._profiles)

    def models(self) -> dict[str, Profile]:
        """Returns the profiles by engine model id."""
        return {profile.model_id: profile for profile in self._profiles.values()}

    def names(self, known: Sequence[recipe.Model]) -> list[str]:
        """Returns the names clients may ask for now, of those the codec knows, sorted."""
        return sorted(
            model.name
            for model in known
            if (profile := self._find(model.name)) and profile.speaks(model.tokenizer_id)
        )

    def profile(self, name: str, *, is_exact: bool = False) -> Profile:
        """Returns what serves a model name. Raises Failure(NO_INSTANCE, NOT_FOUND).

        Args:
            is_exact: the name is an engine's own, no codec has looked at it.
        """
        found = self.models().get(name) if is_exact else self._find(name)
        if found is not None:
            return found
        if not self._profiles:
            raise Failure(Reason.NO_INSTANCE, "no engine is known", retry_after_s=1.0)
        raise Failure(Reason.NOT_FOUND, f"the model {name} is not served here", {"model": name})

    def count(self, role: str, model_id: str) -> int:
        """Returns how many ready engines of a role serve a model."""
        ready = self._view.members(role)
        return sum(m.fingerprint.get("model", model_id) == model_id for m in ready)

    async def run(self) -> None:
        """Describes engines as they come, forgets them as they go, until cancelled."""
        stop = self._view.subscribe(self._changed.set)
        try:
            while True:
                self._changed.clear()
                complete = await self.refresh()
                try:
                    async with asyncio.timeout(None if complete else _AGAIN_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            stop()

    async def refresh(self) -> bool:
        """Asks the engines that are not described yet; returns whether all are."""
        wanted = {(m.address, m.incarnation) for m in self._view.members("prefill")}
        wanted |= {(address, "") for address in self._fixed}
        missing = wanted - self._profiles.keys()
        described = await asyncio.gather(*(self._describe(address) for address, _ in missing))
        for key, profile in zip(missing, described, strict=True):
            if profile is not None:
                self._profiles[key] = profile
        # With nobody there the last profiles stay: requests wait for engines, not for names.
        if wanted:
            for key in self._profiles.keys() - wanted:
                del self._profiles[key]
        return all(profile is not None for profile in described)

    async def _describe(self, address: str) -> Profile | None:
        stub = engine_control_pb2_grpc.EngineControlServiceStub(self._channels.get(address))
        try:
            response = await call(
                stub.Describe, control.DescribeRequest(), timeout_s=_DESCRIBE_TIMEOUT_S
            )
        except Failure as failure:
            log.warning("engine not described", extra={"reason": failure.reason.value})
            return None
        return profile_of(response)

    def _find(self, name: str) -> Profile | None:
        models = self.models()
        wanted = self._aliases.get(name, name)
        if wanted in models:
            return models[wanted]
        # One model in the cluster answers to every name of its codec: the small model stands in
        # for the large one. An alias turns that off for its name.
        if len(models) == 1 and name not in self._aliases:
            return next(iter(models.values()))
        return None
