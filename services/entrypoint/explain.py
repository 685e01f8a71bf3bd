"""`pelagos explain ID`: how a request went, and why its cache hit ended where it did."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from services.entrypoint.command_line import UsageError, error_text, find_target, parse_flags

USAGE: Final = "usage: pelagos explain ID [--folder DIR] [--url URL] [--key-file FILE]"
_WHY: Final = {
    "cap": "the rest is always recomputed (the last ring of tokens)",
    "absent": "the next block was never stored, as far as is known",
    "evicted": "the next block was evicted",
    "lagging": "the index behind the cache has not seen the next block yet",
    "swa_miss": "no window state was there, so one block was given back",
    "namespace": "the request had no cache identity, or the cache was away",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the explanation; returns the exit status."""
    args = list(sys.argv[2:] if argv is None else argv)
    if "-h" in args or "--help" in args:
        print(USAGE)
        return 0
    try:
        flags, words = parse_flags(args, ("folder", "url", "key-file"))
        if len(words) != 1:
            raise UsageError(USAGE)
        response = find_target(flags).request("GET", f"/v1/requests/{words[0]}")
        if response.status != 200:
            raise UsageError(error_text(response))
        print(render(json.loads(response.read())))
    except UsageError as error:
        print(f"pelagos explain: {error}", file=sys.stderr)
        return 2
    return 0


def render(explained: dict[str, Any]) -> str:
    """Returns the text for a person."""
    prompt, hit = explained["prompt_tokens"], explained["hit_tokens"]
    why = _WHY.get(explained["ended_by"], explained["ended_by"] or "the cache was not asked")
    lines = [
        f"request   {explained['request_id']} ({explained['api']})",
        f"outcome   {explained['outcome'] or 'still running'}, attempts {explained['attempts']}",
        f"prompt    {prompt} tokens, {hit} from the cache, "
        f"{explained['replayed_tokens']} replayed, {prompt - hit} computed",
        f"hit ended {why}",
        f"output    {explained['output_tokens']} tokens",
    ]
    lines += [f"{stage['at_ms']:>10.1f} ms  {stage['stage']}" for stage in explained["stages"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
