"""Memory of large messages, kept for the next one.

glibc gives memory of this size back to the kernel when a message is done and takes it again, page
by page, for the next: a fifth of the CPU of matching a prompt of 100,000 tokens, and a quarter
of cutting a block into shards (`make bench-kv`).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3


def keep_freed(max_bytes: int = 64 << 20) -> bool:
    """Lets this process keep so much freed memory; False where there is no glibc to ask."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_MMAP_THRESHOLD, max_bytes // 2),
        (_TRIM_THRESHOLD, max_bytes),
        (_TOP_PAD, max_bytes // 16),
    )
    return all([bool(mallopt(name, value)) for name, value in settings])
