"""`pelagos kv`: the store's tools.

pelagos kv stat ADDRESS              counts of a STORE
pelagos kv ls DIR                    shards in the files of a store (running or not)
pelagos kv verify DIR                the same, every byte checked; status 1 for a fault
pelagos kv trace FILE                hit ratios of a request trace by capacity and TTL
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.kvstore.inspect_files import shards_in
from services.kvstore.trace import curve, plot, read_trace

_CAPACITIES = "1000,5000,10000,30000,50000,100000"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool and returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except (OSError, ValueError) as error:
        print(f"pelagos kv: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pelagos kv", description="The store's tools.")
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    stat = tools.add_parser("stat", help="counts of a STORE")
    stat.add_argument("address", help="host:port")
    stat.set_defaults(run=_stat)
    for name, verify, text in (
        ("ls", False, "shards in the files of a store"),
        ("verify", True, "checks every shard in the files of a store"),
    ):
        tool = tools.add_parser(name, help=text)
        tool.add_argument("dir", type=Path)
        tool.set_defaults(run=_files, verify=verify)
    trace = tools.add_parser("trace", help="hit ratios of a request trace")
    trace.add_argument("file", type=Path, help="JSON lines: timestamp, input_length, hash_ids")
    trace.add_argument("--capacities", default=_CAPACITIES, help="blocks of 512 tokens")
    trace.add_argument("--ttls", default="60,300,900,1800", help="seconds since the last access")
    trace.set_defaults(run=_trace)
    return parser


def _stat(args: argparse.Namespace) -> int:
    from services.common.errors import Failure
    from services.common.rpc_client import Channels
    from services.kvstore.client import StoreClient

    async def ask() -> int:
        channels = Channels()
        try:
            stat = await StoreClient(channels, args.address).stat()
        except Failure as failure:
            print(f"pelagos kv: {failure}", file=sys.stderr)
            return 1
        finally:
            await channels.close()
        for field in stat.DESCRIPTOR.fields:
            print(f"{field.name:<16} {getattr(stat, field.name)}")
        return 0

    return asyncio.run(ask())


def _files(args: argparse.Namespace) -> int:
    if not args.dir.is_dir():
        raise ValueError(f"{args.dir} is no folder")
    num_shards = num_faults = 0
    for found in shards_in(args.dir, args.verify):
        num_shards += 1
        num_faults += bool(found.fault)
        if args.verify and not found.fault:
            continue
        header = found.header
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(header.created_s))
        # Four bytes of a key are enough to recognise it, and too few to use it.
        print(
            f"{found.file} {found.offset:>12} {header.key16[:4].hex()} block {header.block_index}"
            f" shard {header.shard}/{header.k}+{header.m} {header.shard_bytes} B {created} UTC"
            f"{'  FAULT: ' + found.fault if found.fault else ''}"
        )
    print(f"{num_shards} shards" + (f", {num_faults} faults" if args.verify else ""))
    return 1 if num_faults else 0


def _trace(args: argparse.Namespace) -> int:
    capacities = [int(text) for text in args.capacities.split(",") if text]
    ttls = [float(text) for text in args.ttls.split(",") if text]
    print(plot(curve(read_trace(args.file), [None, *capacities], ttls)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
