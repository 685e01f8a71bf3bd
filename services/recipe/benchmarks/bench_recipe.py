"""`make bench-recipe`: the codec beside the packages that do the same, on the same fresh text.

The peers live in a virtual environment of their own; one that cannot be installed is left out with
a message. All run interleaved in one process, each measurement on text that the tokenizer has not
seen (a fresh instance, or another slice of the corpus), and the median is reported. One thread is
measured in processor time, two threads by the clock on the wall: on a busy machine the latter says
little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
VENV: Final = ROOT / ".local" / "bench"
REPORT: Final = ROOT / "docs" / "performance" / "recipe.md"
PEERS: Final = ("deepseek-recipe==0.2.0", "tokenizers", "fastokens", "gigatoken")


def main(argv: Sequence[str] | None = None) -> int:
    """Installs the peers, measures on one and on two threads, writes the report."""
    parser = argparse.ArgumentParser(description="Benchmarks the codec beside its peers.")
    parser.add_argument("--quick", action="store_true", help="1 MB at most, fewer rounds")
    parser.add_argument("--report", type=Path, default=REPORT)
    args = parser.parse_args(argv)
    python = install_peers()
    results = {threads: measure(python, threads, args.quick) for threads in (1, 2)}
    report = to_markdown(results, " ".join(["make bench-recipe", *(argv or [])]))
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(report, "utf-8")
    print(report)
    return 0


def install_peers() -> Path:
    """Returns the Python of the peers' environment."""
    uv = str(Path(sys.executable).with_name("uv"))
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(VENV)], check=True)
    for peer in PEERS:
        command = [uv, "pip", "install", "-q", "--python", str(python), peer]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            print(f"bench-recipe: {peer} cannot be installed here; left out", file=sys.stderr)
    return python


def measure(python: Path, num_threads: int, quick: bool) -> dict[str, Any]:
    """Runs the measurements in the peers' environment with so many threads a tokenizer."""
    from services.recipe import make_tokenizer

    tokenizer_json = make_tokenizer.build()["v4.1"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAYON_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false" if num_threads == 1 else "true",
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [
            str(python),
            "-m",
            "services.recipe.benchmarks.measure",
            str(tokenizer_json),
            output.name,
            str(num_threads),
            *(["--quick"] if quick else []),
        ]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        return dict(json.loads(Path(output.name).read_text("utf-8")))


def to_markdown(results: dict[int, dict[str, Any]], command: str) -> str:
    """Returns the report: per table the measured medians and our ratio to the best peer."""
    lines = [
        "# Performance of the codec",
        "",
        f"Made by `{command}` at commit {_commit()}; {_machine()}. Medians on text that the",
        "tokenizer had not seen; one thread in processor time, two threads by the wall's clock.",
        "A peer whose ids differ from ours, which pass every conformance vector, is *not exact*.",
        "",
    ]
    for threads, result in results.items():
        lines += _encode_table(f"## Encode, {_threads(threads)} (MB/s)", result["encode"])
    one = results[1]
    lines += _encode_table("## Encode, inputs without structure, one thread (MB/s)", one["hard"])
    lines += _growth(one["growth"])
    lines += ["## Whole requests and streams", "", "| what | ours | deepseek-recipe | ratio |"]
    lines += ["| --- | --- | --- | --- |"]
    for row in one["paths"]:
        ours, theirs = row["ours"], row.get("theirs")
        ratio = f"{theirs / ours:.1f} x faster" if theirs else ""
        shown = f"{theirs:.3g} {row['unit']}" if theirs else "-"
        lines.append(f"| {row['what']} | {ours:.3g} {row['unit']} | {shown} | {ratio} |")
    return "\n".join(lines) + "\n"


def _threads(num: int) -> str:
    return "one thread" if num == 1 else f"{num} threads"


def _encode_table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    names = sorted({name for row in rows for name in row["mb_per_s"]} - {"ours"})
    lines = [title, "", "| text | ours | " + " | ".join(names) + " | ours / best exact peer |"]
    lines.append("| --- " * (len(names) + 3) + "|")
    for row in rows:
        rates, exact = row["mb_per_s"], row["exact"]
        cells = []
        for name in names:
            mark = "" if exact.get(name, True) else " (not exact)"
            cells.append(f"{rates[name]:.1f}{mark}" if name in rates else "-")
        best = max((rates[name] for name in names if name in rates and exact.get(name)), default=0)
        ratio = f"{rates['ours'] / best:.2f}" if best else "-"
        cells = [row["text"], f"{rates['ours']:.1f}", *cells, ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _growth(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["## Growth: time of 8 MB over time of 1 MB (8 is linear)", "", "| input | ours |"]
    lines.append("| --- | --- |")
    lines += [f"| {row['text']} | {row['ratio']:.1f} |" for row in rows]
    return [*lines, ""]


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
