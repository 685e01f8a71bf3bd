"""The command as a shell uses it."""

import os
import subprocess
import sys

import pytest

from services.common import cli

COMMAND = [sys.executable, "-m", "services.common.cli"]


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["recipe", "--help"]])
def test_a_reader_that_leaves_early_is_no_traceback(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write_end)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch):
    def interrupted(rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", lambda module, function: interrupted)
    assert cli.main(["sim"]) == 130
