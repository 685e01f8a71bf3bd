"""`pelagos kv`: the store's tools.

pelagos kv stat ADDRESS              counts of a STORE
pelagos kv ls DIR                    shards in the files of a store (running or not)
pelagos kv verify DIR                the same, every byte checked; status 1 for a fault
pelagos kv trace FILE ...            hit ratios of request traces by capacity and TTL; --plot PNG
pelagos kv bench ADDRESS             put, exists and fetch of a STORE on this machine
pelagos kv repair STORE-FLAGS        makes a store that is not running sound; --node ADDRESS
pelagos kv export FILE STORE-FLAGS   blocks to an archive that checks itself; --tenant, --chain
pelagos kv import FILE STORE-FLAGS   stores an archive's blocks

STORE-FLAGS are those of `pelagos serve store`: --backend, --dir, --at, --config and the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from services.common.config import ConfigError, load
from services.common.errors import Failure, Reason
from services.kvstore.backends.base import StorageAway
from services.kvstore.config import StoreConfig
from services.kvstore.inspect_files import shards_in
from services.kvstore.trace import HitRatios, curve, plot, read_trace

_CAPACITIES = "1000,5000,10000,30000,50000,100000"
_TTLS = "60,300,900,1800"
Number = TypeVar("Number", int, float)
_OTHER = "what answers there is a service of another kind"
_STORE_FLAGS = "then the flags of `pelagos serve store`"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool and returns its exit status."""
    try:
        args, rest = _parser().parse_known_args(argv)
        if rest and not args.takes_store:
            print(f"pelagos kv: what is {rest[0]}?", file=sys.stderr)
            return 2
        if args.takes_store:
            args.config = load(StoreConfig, "store", rest, os.environ).config
        status: int = args.run(args)
        return status
    except BrokenPipeError:
        raise  # an OSError, but no fault: `pelagos` itself ends quietly for it
    except Failure as error:
        is_other = error.reason is Reason.WRONG_ROLE
        print(f"pelagos kv: {_OTHER if is_other else error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, StorageAway, ConfigError, _BadValue) as error:
        print(f"pelagos kv: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pelagos kv", description="The store's tools.")
    parser.set_defaults(takes_store=False)
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    stat = tools.add_parser("stat", help="counts of a STORE")
    stat.add_argument("address", type=_address, help="host:port")
    stat.set_defaults(run=_stat)
    for name, verify, text in (
        ("ls", False, "shards in the files of a store"),
        ("verify", True, "checks every shard in the files of a store"),
    ):
        tool = tools.add_parser(name, help=text)
        tool.add_argument("dir", type=Path)
        tool.set_defaults(run=_files, verify=verify)
    trace = tools.add_parser("trace", help="hit ratios of request traces")
    trace.add_argument(
        "files", type=Path, nargs="+", help="JSON lines: timestamp, input_length, hash_ids"
    )
    trace.add_argument(
        "--capacities", type=_numbers(int), default=_CAPACITIES, help="blocks of 512 tokens"
    )
    trace.add_argument(
        "--ttls", type=_numbers(float), default=_TTLS, help="seconds since the last access"
    )
    trace.add_argument("--plot", type=Path, help="a PNG of the curves")
    trace.add_argument("--store", type=_address, help="replay against a running STORE, host:port")
    trace.add_argument("--requests", type=_from(0), default=0, help="only so many; 0: all")
    trace.set_defaults(run=_trace)
    bench = tools.add_parser("bench", help="put, exists and fetch of a STORE on this machine")
    bench.add_argument("address", type=_address, help="host:port")
    bench.add_argument("--blocks", type=_from(1), default=256)
    bench.add_argument("--payload", type=_from(1), default=114_688, help="bytes of a block")
    bench.add_argument("--rounds", type=_from(1), default=5)
    bench.set_defaults(run=_bench)
    repair = tools.add_parser("repair", help="makes a store sound", epilog=_STORE_FLAGS)
    repair.add_argument("--node", type=_address, help="a running storage node instead, host:port")
    repair.add_argument("--bytes_per_s", type=_from(0), default=0, help="of a node; 0: its default")
    repair.set_defaults(run=_repair, takes_store=True)
    export = tools.add_parser("export", help="blocks to an archive", epilog=_STORE_FLAGS)
    export.add_argument("file", type=Path)
    export.add_argument("--tenant", default="", help="only this tenant's")
    export.add_argument(
        "--chain", type=_key_start, default=b"", help="only one prompt's prefix: the first 8 or "
        "more hex digits of its last block's key, as `ls` shows them",
    )  # fmt: skip
    export.set_defaults(run=_export, takes_store=True)
    import_ = tools.add_parser("import", help="stores an archive's blocks", epilog=_STORE_FLAGS)
    import_.add_argument("file", type=Path)
    import_.set_defaults(run=_import, takes_store=True)
    return parser


class _BadValue(Exception):
    """What was given is not what a flag takes; no ValueError, of which argparse makes two lines."""


def _address(text: str) -> str:
    """Returns host:port or unix:path. gRPC would take a port of 99999 for 34463."""
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if text.startswith("unix:") or (host and is_port and text.isprintable()):
        return text
    raise _BadValue(f"{text!r} is not host:port")


def _from(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers, none below `least`."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            number = int(text)
            if least <= number < 1 << 63:
                return number
        raise _BadValue(f"{text!r} is not a whole number from {least} on")

    return parse


def _numbers(kind: type[Number]) -> Callable[[str], list[Number]]:
    """Returns a parser of numbers with commas between them, none below 0."""

    def parse(text: str) -> list[Number]:
        with suppress(ValueError):
            found = [kind(part) for part in text.split(",") if part.strip()]
            if all(0 <= number < math.inf for number in found):
                return found
        raise _BadValue(f"{text!r} is not a list like 10,20,30")

    return parse


def _key_start(text: str) -> bytes:
    with suppress(ValueError):
        if len(text) >= 8:
            return bytes.fromhex(text)
    raise _BadValue(f"{text!r} is not 8 hex digits or more, an even number")


def _stat(args: argparse.Namespace) -> int:
    from services.common.rpc_client import Channels
    from services.kvstore.client import StoreClient

    async def ask() -> int:
        channels = Channels()
        try:
            stat = await StoreClient(channels, args.address).stat()
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
    if args.store:
        return _trace_on_store(args)
    curves: dict[str, list[HitRatios]] = {}
    for file in args.files:
        requests = read_trace(file)[: args.requests or None]
        curves[file.stem] = curve(requests, [None, *args.capacities], args.ttls)
        if len(args.files) > 1:
            print(file.stem)
        print(plot(curves[file.stem]))
    if args.plot:
        from services.kvstore.tools.plots import draw

        draw(curves, args.plot)
    return 0


def _trace_on_store(args: argparse.Namespace) -> int:
    from services.kvstore.tools.live_trace import replay_on_store

    for file in args.files:
        requests = read_trace(file)[: args.requests or None]
        print(plot([_run(replay_on_store(args.store, requests))]))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from services.kvstore.tools.bench import bench_store

    rates = _run(
        bench_store(
            args.address,
            num_blocks=args.blocks,
            payload_bytes=args.payload,
            num_rounds=args.rounds,
        )
    )
    print("\n".join(rates.lines()))
    return 0


def _repair(args: argparse.Namespace) -> int:
    from services.kvstore.tools.repair import repair_store, scrub_node

    if args.node:
        done = _run(scrub_node(args.node, args.bytes_per_s))
    else:
        done = _run(repair_store(args.config))
    print(
        f"{done.num_checked} shards read, {done.num_damaged} damaged and let go, "
        f"{done.num_adopted} taken up, {done.num_lost} records without a block, "
        f"{done.num_orphans} orphans freed"
    )
    return 0


def _export(args: argparse.Namespace) -> int:
    from services.kvstore.tools.transfer import export_blocks

    done = _run(export_blocks(args.config, args.file, tenant=args.tenant, chain=args.chain))
    damaged = f", {done.num_damaged} damaged ones left out" if done.num_damaged else ""
    print(f"{done.num_blocks} blocks, {done.num_bytes} bytes{damaged}")
    return 1 if done.num_damaged else 0


def _import(args: argparse.Namespace) -> int:
    from services.kvstore.tools.transfer import import_blocks

    done = _run(import_blocks(args.config, args.file))
    print(
        f"{done.stored} blocks stored, {done.known} were there, "
        f"{done.without_parent} without their parent, {done.no_room} without room"
    )
    return 1 if done.without_parent or done.no_room else 0


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


if __name__ == "__main__":
    sys.exit(main())
