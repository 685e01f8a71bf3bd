"""A fixed sample of the crash campaign; all of it is `make campaign-kv` (docs/campaigns.md)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Files in memory where there are any: the lives flush all the time, and what a flush means to the
# campaign is decided by the campaign.
_MEMORY = Path("/dev/shm")


@pytest.mark.timeout(300)
def test_p_30_p_31_t_crash_a_sample_of_seeds_gives_no_wrong_byte_and_loses_nothing() -> None:
    """25 seeds: each kind of fault four times over the embedded store, once over nodes."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pelagos-campaign-", dir=parent) as folder:
        # In a process of its own: lives are forked from one that runs no threads.
        done = subprocess.run(
            [sys.executable, "-m", "tests.campaign.kv", "--seeds", "25", "--folder", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(Path(folder).iterdir()) == []
