"""One tokenizer for all tests of the codec: it is loaded once."""

import pytest

from services.recipe import make_tokenizer
from services.recipe.codec import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_paths():
    return make_tokenizer.build()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_paths):
    return Tokenizer(tokenizer_paths["v4.1"])
