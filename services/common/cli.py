"""The `pelagos` command. Each subcommand is a `main(argv) -> int`, imported when it is called.

To add one, add a row to COMMANDS or SERVICES; light commands must stay free of torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

# `pelagos serve NAME`: the module whose main(argv) runs the service.
SERVICES: Final[Mapping[str, str]] = {
    "recipe": "services.recipe.main",
    "entrypoint": "services.entrypoint.main",
    "prefill-lb": "services.lb.prefill.main",
    "decode-lb": "services.lb.decode.main",
    "vision-lb": "services.lb.vision.main",
    "eplb": "services.lb.expert.main",
    "autoscaler": "services.lb.autoscaler.main",
    "check": "services.kvstore.check.main",
    "store": "services.kvstore.store.main",
    "storage-node": "services.kvstore.storage.main",
    "gc": "services.kvstore.gc.main",
    "swa": "services.kvstore.swa.main",
    "so-compiler": "services.so_compiler.main",
    "prefill": "services.prefill.main",
    "decode": "services.decode.main",
    "encoder": "services.encoder.main",
}

# `pelagos NAME ...`: module:function and one line of help.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "up": ("deploy.local.up:main", "start the local stack and wait until it is ready"),
    "status": ("deploy.local.status:main", "what is running and how it is doing"),
    "top": ("deploy.local.top:main", "a live view of the local stack"),
    "doctor": ("deploy.local.doctor:main", "what is wrong with this machine"),
    "chat": ("services.entrypoint.chat:main", "a conversation in the terminal"),
    "eval": ("deploy.local.evaluate:main", "held-out questions through the stack, in all modes"),
    "recipe": ("services.recipe.cli:main", "recipe check DIR: the codec's conformance vectors"),
    "kv": ("services.kvstore.cli:main", "the store's tools"),
    "trace": ("services.common.trace_cli:main", "trace ID: one request's timeline"),
    "explain": ("services.entrypoint.explain:main", "explain ID: why its cache hit ended there"),
    "sim": ("services.lb.sim.cli:main", "the cluster simulator"),
    "model": ("services.engine.model.cli:main", "model inspect DIR: what a checkpoint holds"),
    "engine": ("services.engine.cli:main", "engine conformance ADDRESS: the engine suite"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["serve"]:
        return _serve(args[1:])
    try:
        status = _run(args)
        sys.stdout.flush()  # here, where a reader that has left is no news
        return status
    except BrokenPipeError:
        # `pelagos … | head`: what is left in the buffer has nowhere to go at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    command, *rest = args
    if command == "version":
        from importlib.metadata import version

        print(version("pelagos"))
        return 0
    if command not in COMMANDS:
        return _unknown("command", command, ("serve", "version", *COMMANDS))
    module, _, function = COMMANDS[command][0].partition(":")
    return _load(module, function)(rest)


def _serve(args: Sequence[str]) -> int:
    if not args or args[0].startswith("-"):
        print("usage: pelagos serve NAME [--config FILE] [--key value ...]")
        print("services: " + ", ".join(SERVICES))
        return 0 if args else 2
    if args[0] not in SERVICES:
        return _unknown("service", args[0], tuple(SERVICES))
    return _load(SERVICES[args[0]], "main")(list(args[1:]))


def _load(module: str, function: str) -> Callable[[Sequence[str]], int]:
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        # Only our own missing module reads as "not installed"; a missing dependency names itself.
        print(f"pelagos: not in this installation: {error.name}", file=sys.stderr)
        raise SystemExit(2) from None
    return cast(Callable[[Sequence[str]], int], found)


def _unknown(kind: str, name: str, known: Sequence[str]) -> int:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    print(f"pelagos: unknown {kind} {name!r}{hint}", file=sys.stderr)
    return 2


def _usage() -> str:
    lines = [
        "usage: pelagos COMMAND ...",
        "",
        f"  {'serve NAME':<12} one service, as in production",
    ]
    lines += [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    lines += [f"  {'version':<12} what is installed", "", "services: " + ", ".join(SERVICES)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
