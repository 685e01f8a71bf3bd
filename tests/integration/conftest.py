"""One stack for the tests that only talk to it, scripted so that they know what it will say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.plan import StackConfig
from tests.support.background_stack import BackgroundStack, scripted_flags

MODEL = "DeepSeek-V4.1-Flash"


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the scripts that the shared stack plays."""
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, scripts: Path
) -> Iterator[BackgroundStack]:
    """Every service as a process; a script per request id, an echo without one."""
    folder = tmp_path_factory.mktemp("stack") / "with a space"
    config = StackConfig(folder=folder, flags=scripted_flags(scripts, time_scale=0.02))
    with BackgroundStack(config) as stack:
        yield stack
