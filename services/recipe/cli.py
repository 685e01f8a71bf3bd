"""`pelagos recipe`: tools of the codec."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Differences shown of one file; the rest is only counted.
MAX_SHOWN_CASES = 3
MAX_SHOWN_DIFFERENCES = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; 0 when all is well, 1 on any failure."""
    parser = argparse.ArgumentParser(prog="pelagos recipe", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)
    check = tools.add_parser("check", help="run the conformance vectors of a folder")
    check.add_argument("folder", type=Path)
    check.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json to use; built from the package if absent"
    )
    args = parser.parse_args(argv)
    return check_command(args.folder, args.tokenizer)


def check_command(folder: Path, tokenizer_path: Path | None) -> int:
    """Prints `FILE: N passed, M failed` and the first differences of each file."""
    from services.recipe import make_tokenizer
    from services.recipe.check import CHECKS, check_folder
    from services.recipe.codec import Tokenizer

    try:
        path = tokenizer_path or make_tokenizer.build()["v4.1"]
        tokenizer = Tokenizer(path)
    except (RuntimeError, ValueError) as error:
        print(f"pelagos recipe check: {error}", file=sys.stderr)
        return 1
    num_files = num_failed = 0
    for result in check_folder(folder, tokenizer):
        num_files += 1
        num_failed += len(result.failures)
        print(result.line, flush=True)
        for label, differences in result.failures[:MAX_SHOWN_CASES]:
            print(f"  {label}")
            for difference in differences[:MAX_SHOWN_DIFFERENCES]:
                print(f"    {difference}")
    if num_files == 0:
        known = ", ".join(CHECKS)
        print(f"pelagos recipe check: no vector file in {folder}; known: {known}", file=sys.stderr)
        return 1
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
