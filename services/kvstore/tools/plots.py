"""Draws hit curves of traces as a picture; needs the extra `plots`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.kvstore.trace import HitRatios


def draw(curves: Mapping[str, Sequence[HitRatios]], path: Path) -> None:
    """Writes one picture: block-hit ratio by capacity, and by time to live, a line per trace.

    Raises: ValueError without the package matplotlib; OSError.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("agg")  # no display is asked for
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ValueError("a plot needs matplotlib: install the extra pelagos[plots]") from None
    figure, (by_capacity, by_ttl) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, dpi=110)
    for number, (name, points) in enumerate(sorted(curves.items())):
        colour = f"C{number}"
        limited = sorted((p.capacity, p.blocks) for p in points if p.capacity is not None)
        by_capacity.plot(*zip(*limited, strict=True), "o-", color=colour, label=name)
        timed = sorted((p.ttl_s, p.blocks) for p in points if p.ttl_s is not None)
        by_ttl.plot(*zip(*timed, strict=True), "o-", color=colour, label=name)
        for point in points:
            if point.capacity is None and point.ttl_s is None:
                for axes in (by_capacity, by_ttl):
                    axes.axhline(point.blocks, color=colour, linestyle=":", linewidth=1)
    by_capacity.set(xscale="log", xlabel="capacity, blocks of 512 tokens", ylabel="blocks hit")
    by_ttl.set(xscale="log", xlabel="time to live since the last access, s")
    for axes in (by_capacity, by_ttl):
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    by_capacity.legend(title="trace (dotted: no limit)", loc="lower right")
    figure.tight_layout()
    # No date inside: the same traces give the same file.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
