"""Models and tokenizers by name: what a request's model name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from services.common.errors import Failure, Reason
from services.common.tokenizer_id import tokenizer_id
from services.recipe import codec, make_tokenizer
from services.recipe.codec import DEFAULT_MODELS, ModelVersion, Tokenizer
from services.recipe.config import RecipeConfig

MAX_SHOWN_NAME = 64


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer under its name. `tokenizer_id` is equal for equal files."""

    name: str
    tokenizer: Tokenizer
    tokenizer_id: str
    special_ids: Mapping[str, int]


@dataclass(frozen=True)
class Model:
    """A name that requests may ask for."""

    name: str
    version: ModelVersion
    tokenizer: LoadedTokenizer


class Registry:
    """The models of one process. Immutable; its tokenizers are thread-safe."""

    def __init__(
        self,
        models: Mapping[str, Model],
        tokenizers: Mapping[str, LoadedTokenizer],
        options: codec.Options,
    ) -> None:
        self.models = models
        self.tokenizers = tokenizers
        self.spellings = options.spelling_list()
        self.options = options.native()

    def tokenizer_of(self, model: str, name: str = "") -> LoadedTokenizer:
        """Returns the tokenizer named, or else the model's; a model nobody knows has the default.

        An unknown model is refused by conversion, with the API's own words.
        Raises: Failure(NOT_FOUND) for an unknown tokenizer name.
        """
        if name:
            return self._named(name)
        return self.models[model].tokenizer if model in self.models else self._named("v4.1")

    def _named(self, name: str) -> LoadedTokenizer:
        if name not in self.tokenizers:
            # No longer than what trailers carry, whatever was asked for.
            shown = name[:MAX_SHOWN_NAME]
            raise Failure(
                Reason.NOT_FOUND, f"no tokenizer is named {shown!r}", {"tokenizer": shown}
            )
        return self.tokenizers[name]


def load_registry(config: RecipeConfig) -> Registry:
    """Builds and loads everything the configuration names.

    Raises: RuntimeError when the tokenizer package is missing, ValueError for a bad file.
    """
    folder = Path(config.tokenizer_folder or make_tokenizer.DEFAULT_FOLDER)
    paths = {**make_tokenizer.build(folder), **{n: Path(p) for n, p in config.tokenizers.items()}}
    versions: dict[str, ModelVersion] = dict(DEFAULT_MODELS)
    tokenizer_names: dict[str, str] = dict(DEFAULT_MODELS)
    for name, model in config.models.items():
        version, _, tokenizer = model.partition("@")
        versions[name] = cast(ModelVersion, version)
        tokenizer_names[name] = tokenizer or version
    options = codec.Options(
        default_thinking_mode=config.default_thinking_mode,
        reasoning_content_behavior=config.reasoning_content_behavior,
        responses_web_search=config.responses_web_search,
        messages_web_search=config.messages_web_search,
        strict_schema_keywords=config.strict_schema_keywords,
        thinking_max_tokens_upper_bound=config.thinking_max_tokens_upper_bound,
        non_thinking_max_tokens_upper_bound=config.non_thinking_max_tokens_upper_bound,
        image_max_tokens=config.image_max_tokens,
        image_min_pixels=config.image_min_pixels,
        models=versions,
        spellings=config.spellings,
    )
    spellings = {**codec.DEFAULT_SPELLINGS, **config.spellings}
    tokenizers = {
        name: _load(name, path, spellings, config.num_threads, config.cache_bytes)
        for name, path in paths.items()
    }
    models = {
        name: Model(name, version, tokenizers[tokenizer_names[name]])
        for name, version in versions.items()
    }
    return Registry(models, tokenizers, options)


def _load(
    name: str, path: Path, spellings: Mapping[str, str], num_threads: int, cache_bytes: int
) -> LoadedTokenizer:
    tokenizer = Tokenizer(path, num_threads=num_threads, cache_bytes=cache_bytes)
    found = {special: tokenizer.added_id(spelling) for special, spelling in spellings.items()}
    special_ids = {special: id_ for special, id_ in found.items() if id_ is not None}
    return LoadedTokenizer(name, tokenizer, tokenizer_id(path.read_bytes()), special_ids)
