"""`pelagos status`: what of the local stack is running and how it is doing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local.http import http_get
from deploy.local.stack import read_state
from deploy.local.up import default_folder

_USAGE = "usage: pelagos status [FOLDER] [--json]"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line per process. 0: all are ready; 1: some are not; 3: nothing runs."""
    args = list(argv or ())
    if "--help" in args or "-h" in args:
        print(_USAGE)
        return 0
    as_json = "--json" in args
    folders = [arg for arg in args if not arg.startswith("-")]
    if len(folders) > 1 or any(arg.startswith("-") and arg != "--json" for arg in args):
        print(_USAGE, file=sys.stderr)
        return 2
    folder = Path(folders[0]) if folders else default_folder()
    state = read_state(folder)
    if state is None:
        print(f"no stack is running in {folder}; `pelagos up` starts one", file=sys.stderr)
        return 3
    report = asyncio.run(look(state))
    print(json.dumps(report, indent=1) if as_json else render(report))
    return 0 if all(item["ready"] for item in report["processes"]) else 1


async def look(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with what every process says of itself now."""
    names = list(state["processes"])
    found = await asyncio.gather(*(_look_at(state["processes"][name]) for name in names))
    processes = [
        {"name": name, **state["processes"][name], **item}
        for name, item in zip(names, found, strict=True)
    ]
    kept = ("pid", "started_s", "cluster", "etcd", "etcd_pid", "engine", "api_key_file")
    return {**{key: state[key] for key in kept}, "processes": processes}


async def _look_at(process: Mapping[str, Any]) -> dict[str, Any]:
    admin = process["admin"]
    if not admin:
        return {"ready": False, "alive": False, "census": {}}
    (ready, _), (alive, _), (status, census) = await asyncio.gather(
        *(http_get(admin, path) for path in ("/readyz", "/healthz", "/census"))
    )
    return {
        "ready": ready == 200,
        "alive": alive == 200,
        "census": json.loads(census) if status == 200 else {},
    }


def render(report: Mapping[str, Any], now_s: float | None = None) -> str:
    """Returns the table for a terminal."""
    up_s = (time.time() if now_s is None else now_s) - report["started_s"]
    rows = [("PROCESS", "STATE", "PID", "RESTARTS", "MEMORY", "HOLDS", "ADDRESS")]
    for item in report["processes"]:
        own = item["census"].get("process", {})
        rows.append(
            (
                item["name"],
                _state(item),
                str(item["pid"] or "-"),
                str(item["num_restarts"]),
                f"{own['bytes'] / 1e6:.0f} MB" if "bytes" in own else "-",
                _holds(item["census"]),
                item["labels"].get("http") or item["address"] or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    num_ready = sum(item["ready"] for item in report["processes"])
    etcd = "running" if report["etcd_pid"] else "elsewhere"
    head = (
        f"cluster {report['cluster']}, engine {report['engine']}, up {up_s:.0f} s, "
        f"{num_ready} of {len(report['processes'])} ready, etcd {etcd} at {report['etcd']}"
    )
    return "\n".join([head, "", *lines])


def _state(item: Mapping[str, Any]) -> str:
    if item["state"] == "ready" and not item["alive"]:
        return "stuck"
    if item["state"] == "ready" and not item["ready"]:
        return "not ready"
    return str(item["state"])


def _holds(census: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the sums over owners of what may leak, zeros left out."""
    sums: dict[str, int] = {}
    for owner, kinds in census.items():
        if owner not in ("process", "rpc_client"):
            for kind, count in kinds.items():
                sums[kind] = sums.get(kind, 0) + count
    return " ".join(f"{kind}={count}" for kind, count in sorted(sums.items()) if count) or "-"
