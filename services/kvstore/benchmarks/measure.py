"""The parts of `bench_kv` that have peers, run in the peers' environment.

    python -m services.kvstore.benchmarks.measure OUTPUT PART [--quick]

A part is a process: a peer that hangs or dies takes only its own tables along. It imports of
Pelagos only pure modules and the native crate, so it needs none of its dependencies.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Final

from services.kvstore.benchmarks import part_blocks, part_codes, part_match, peers
from services.kvstore.checksums import HAS_NATIVE
from services.kvstore.memory import keep_freed

# On a real file system: /tmp may be memory, which no store of blocks lives in.
_SCRATCH: Final = peers.VENV.parent
# A part takes a few minutes; one that takes this long says where it stands, and ends.
DEADLINE_S: Final = 900.0


def main() -> None:
    """Measures everything and writes it as JSON."""
    if not HAS_NATIVE:
        raise SystemExit("bench-kv: the native crate is not built; run make setup")
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    keep_freed()  # as CHECK, STORE and storage nodes run; the peers of this process gain as well
    output, part, quick = Path(sys.argv[1]), sys.argv[2], "--quick" in sys.argv
    left_out: list[str] = []
    _SCRATCH.mkdir(parents=True, exist_ok=True)
    if part == "match":
        sections = part_match.run(quick, left_out.append)
    elif part == "blocks":
        sections = part_blocks.run(quick, left_out.append, _SCRATCH)
    else:
        sections = part_codes.run(quick, left_out.append, _SCRATCH)
    found = {"sections": [section.to_json() for section in sections], "left_out": left_out}
    output.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
