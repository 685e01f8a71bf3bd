"""The checkpoint that a stack is about to serve: whether it can, said before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from services.engine.model.config import ConfigError, ModelConfig
from services.engine.model.vocabulary import TOKENIZER, vocabulary_of


class ModelUnfit(Exception):
    """No stack can serve this folder; the text says why and what to do."""


def has_torch() -> bool:
    """Returns whether the engine extra is installed."""
    return importlib.util.find_spec("torch") is not None


def codec_flags(folder: Path) -> list[str]:
    """Returns what the codec must know of the model's vision encoder to widen an image's span."""
    vision = ModelConfig.load(folder).vision
    if vision is None:
        return []
    return [
        f"--image_max_tokens={vision.max_image_tokens}",
        f"--image_min_pixels={vision.min_pixels}",
    ]


def check_model(folder: Path) -> None:
    """Raises ModelUnfit unless the folder holds a network with its tokenizer, and torch is there.

    Configuration and tokenizer only; the engines check the weights when they load them.
    """
    if not has_torch():
        raise ModelUnfit(
            "the network needs torch: `make setup-engine` brings it (about 3 GB), "
            "`--engine sim` does without"
        )
    try:
        config = ModelConfig.load(folder)
        vocabulary = vocabulary_of(folder)
        if vocabulary is None:
            raise ModelUnfit(
                f"{folder} has no {TOKENIZER}: without it nobody knows what its ids mean"
            )
        vocabulary.demand_fits(config)
    except OSError as error:
        raise ModelUnfit(
            f"{folder} holds no model ({error.strerror}): give one with --checkpoint, or make one "
            "with `pelagos model make-random DIR --tokenizer FILE`"
        ) from None
    except ConfigError as error:
        raise ModelUnfit(f"{folder}: {error}") from None
