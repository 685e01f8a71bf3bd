"""The report of `bench_kv`: claims first, then the tables they come from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from services.kvstore.benchmarks.peers import ROOT

BEGIN: Final = "<!-- bench-kv: written by make bench-kv; edits below are lost -->"
_MET: Final = {True: "yes", False: "**no**", None: "-"}


def to_markdown(sections: Sequence[dict[str, Any]], left_out: Sequence[str], command: str) -> str:
    """Returns what stands below the mark."""
    lines = [BEGIN, "", f"Made by `{command}` at commit {_commit()}; {_machine()}.", ""]
    lines += ["| claim | target | measured | met |", "| --- | --- | --- | --- |"]
    for claim in (claim for section in sections for claim in section["claims"]):
        cells = [claim["what"], claim["target"], claim["measured"], _MET[claim["met"]]]
        lines.append(f"| {' | '.join(cells)} |")
    if left_out:
        lines += ["", "Left out:", "", *(f"- {what}" for what in left_out)]
    for section in sections:
        lines += ["", f"## {section['title']}", "", section["note"], ""]
        lines += ["| what | CPU | clock |", "| --- | ---: | ---: |"]
        for row in section["rows"]:
            cpu, wall = _number(row["cpu"]), _number(row["wall"])
            lines.append(f"| {row['name']} | {cpu} {row['unit']} | {wall} {row['unit']} |")
    return "\n".join(lines) + "\n"


def splice(document: Path, text: str) -> str:
    """Returns the document with everything from its mark on replaced."""
    known = document.read_text("utf-8") if document.exists() else ""
    head = known.partition(BEGIN)[0]
    return head + text


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _machine() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"{name}, {os.cpu_count()} cores, load {load:.1f} at the end, Python {python}"
