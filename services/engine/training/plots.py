"""Plots of a training run: loss and scores over tokens, and how honest confidences are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from services.engine.training.acceptance import Floats, Trials, survivals
from services.engine.training.acceptance import calibration as calibrated
from services.engine.training.schedule import TOKENS_PER_STEP

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "pelagos-mini"
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot as plt  # noqa: E402  the backend comes first

_SHOWN = (
    *("talk", "copy_words", "fact", "recall", "needle", "sum2", "json", "tool_call"),
    "tool_result",
)


def training(log: Path, path: Path) -> None:
    """Draws the loss of a run and the share of right answers, by tokens seen."""
    facts = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [fact for fact in facts if "loss" in fact]
    judged = [fact for fact in facts if "held_out" in fact]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    millions = TOKENS_PER_STEP / 1e6
    left.plot([f["step"] * millions for f in steps], _smooth([f["loss"] for f in steps]), lw=1)
    left.plot(
        [f["step"] * millions for f in judged],
        [f["held_out"]["loss"] for f in judged],
        "o",
        ms=3,
    )
    left.set(xlabel="million tokens", ylabel="loss", yscale="log")
    left.legend(["training", "held out"], frameon=False)
    for kind in _SHOWN:
        points = [(f["step"] * millions, f["held_out"]["plain"].get(kind)) for f in judged]
        known = [(x, counts[0] / counts[1]) for x, counts in points if counts]
        if known:
            right.plot(*zip(*known, strict=True), lw=1, label=kind.replace("_", " "))
    right.set(xlabel="million tokens", ylabel="answers right, held out", ylim=(0, 1.02))
    right.legend(frameon=False, fontsize=7)
    for border in (f["step"] for a, f in itertools.pairwise(judged) if _moved(a, f)):
        right.axvline(border * millions, color="0.85", lw=0.8, zorder=0)
    _save(figure, path)


def calibration(found: Trials, temperatures: Floats, path: Path) -> None:
    """Draws the share of accepted drafts over the chance that the head gave them."""
    happened = np.logical_and.accumulate(found.right, axis=1)[found.inside]
    figure, axes = plt.subplots(figsize=(4.2, 4))
    axes.plot([0, 1], [0, 1], color="0.8", lw=1)
    plain = np.ones_like(temperatures)
    for name, value in (("as trained", plain), ("with temperatures", temperatures)):
        error, bins = calibrated(survivals(found, value)[found.inside], happened)
        chance, share, _ = zip(*bins, strict=True)
        axes.plot(chance, share, "o-", ms=3, lw=1, label=f"{name}, error {error:.3f}")
    axes.set(xlabel="chance of survival, as told", ylabel="share that survived")
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _moved(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return bool(before["length"] != after["length"])


def _smooth(values: list[float], width: int = 5) -> list[float]:
    return [float(np.mean(values[max(0, i - width + 1) : i + 1])) for i in range(len(values))]


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
