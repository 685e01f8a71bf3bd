"""The folder of a store: what it was made for, and errors that name it.

A folder says in a small file how large its slots are, which kind of shards lie in them and of which
cluster. Opened for anything else, its shards would look like nothing, and their slots would be
written over: that is refused before a byte is touched.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.common.config import ConfigError
from services.kvstore.checksums import crc32c

_FILE: Final = "made-for"
_WORDS: Final = {
    errno.EAGAIN: "another process uses it",
    errno.EEXIST: "there is a file where a folder should be",
    errno.ENOTDIR: "there is a file where a folder should be",
}


@dataclass(frozen=True)
class MadeFor:
    """What a folder of segments was made for."""

    slot_bytes: int
    profile: str  # "1+0": blocks whole
    cluster: str = ""  # empty where it makes no difference


@contextmanager
def using(folder: Path) -> Iterator[None]:
    """Makes an OSError of opening what is in a folder a ConfigError that says what is wrong."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise  # of a wait, which has no more to do with the folder than with anything
        number = error.errno or 0
        raise ConfigError(f"dir {folder}: {_WORDS.get(number, os.strerror(number))}") from error


def check_made_for(folder: Path, wanted: MadeFor) -> None:
    """Raises ConfigError when the folder was made for something else; changes nothing.

    A folder that does not say, for it is new, old or damaged there, is taken as it is.
    """
    found = _read(folder / _FILE)
    if found is None or found == wanted:
        return
    if found.profile != wanted.profile:
        raise ConfigError(
            f"dir {folder}: it holds shards of {found.profile}, not of {wanted.profile}"
        )
    if found.cluster != wanted.cluster:
        raise ConfigError(
            f"dir {folder}: it belongs to cluster {found.cluster!r}, not {wanted.cluster!r}"
        )
    raise ConfigError(
        f"dir {folder}: its slots have {found.slot_bytes} bytes, not {wanted.slot_bytes}: give it "
        "the payload_bytes that it was made with, or another folder"
    )


def note_made_for(folder: Path, made_for: MadeFor) -> None:
    """Writes down what the folder is made for; a disk without room must not keep it shut."""
    if _read(folder / _FILE) == made_for:
        return
    text = json.dumps(asdict(made_for), sort_keys=True)
    draft = folder / f".{_FILE}.{os.getpid()}"
    with suppress(OSError):
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{text}\n{crc32c(text.encode()):08x}\n")
        draft.rename(folder / _FILE)
        return
    with suppress(OSError):
        draft.unlink(missing_ok=True)


def _read(path: Path) -> MadeFor | None:
    try:
        text, sum_ = path.read_text(encoding="utf-8").splitlines()
        fields = json.loads(text)
        is_sound = int(sum_, 16) == crc32c(text.encode())
        return MadeFor(**fields) if is_sound else None
    except (OSError, ValueError, TypeError):
        return None
