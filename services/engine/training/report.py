"""The figures of the model card: scores, acceptance and calibration of the checkpoint as it is.

    python -m services.engine.training.report --out build/training/pelagos-mini

Measures the exported files, not the run's own parameters, on rows of the test split; writes
`scores.json` and the tables between the marks of `README.md`, and draws the plots.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.engine.model.checkpoint import CheckpointReader
from services.engine.model.config import ModelConfig
from services.engine.training import plots
from services.engine.training.acceptance import Trials, calibration, survivals, trials
from services.engine.training.draft import DraftTrainer
from services.engine.training.evaluate import DISTANCES, evaluate, held_out
from services.engine.training.export import DEFAULT_TO
from services.engine.training.parameters import from_source
from services.engine.training.tasks.stages import KINDS, Stage
from services.engine.training.train import DEFAULT_OUT, LOG, VOCABULARY

# Aims are set for rows of 768, to a hundredth: that takes thousands of answers of a kind.
_ROWS = {384: (Stage.LONG, 240), 768: (Stage.TOOLS, 1200), 1536: (Stage.TOOLS, 80)}
_DRAFT_ROWS = 60
SCORES = "scores.json"
CARD = "README.md"
PLOTS = Path("docs/plots")


def load(directory: Path) -> DraftTrainer:
    """Returns the network of a checkpoint, with its draft head."""
    config = ModelConfig.load(directory)
    with CheckpointReader(directory, config) as source:
        return DraftTrainer(from_source(config, source), config=config)


def measure(directory: Path, *, share: float = 1.0) -> tuple[dict[str, Any], Trials]:
    """Returns the figures of a checkpoint; `share` below 1 takes fewer rows."""
    head = load(directory)
    tokenizer = directory / VOCABULARY
    by_length: dict[str, Any] = {}
    for length, (stage, count) in _ROWS.items():
        rows = held_out(tokenizer, stage, length, max(1, int(count * share)))
        by_length[str(length)] = evaluate(head.network, rows).document()
    rows = held_out(tokenizer, Stage.TOOLS, 768, max(1, int(_DRAFT_ROWS * share)))
    found = trials(head, rows)
    fitted = np.array(head.config.system.confidence_temperatures or np.ones(found.raw.shape[1]))
    happened = np.logical_and.accumulate(found.right, axis=1)
    errors = {
        name: calibration(survivals(found, value)[found.inside], happened[found.inside])[0]
        for name, value in (("plain", np.ones_like(fitted)), ("fitted", fitted))
    }
    document = {
        "lengths": by_length,
        "drafts": {
            "by_position": found.by_position(),
            "mean_accepted": float(found.accepted.mean()),
            "mean_where_all_fit": float(found.accepted[found.whole].mean()),
            "by_kind": found.by_kind(),
            "anchors": len(found.raw),
            "calibration_error": errors,
            "temperatures": fitted.tolist(),
        },
    }
    return document, found


def tables(document: Mapping[str, Any]) -> str:
    """Returns the figures as the card shows them, in Markdown."""
    lengths = document["lengths"]
    lines = ["| kind | " + " | ".join(f"rows of {length}" for length in lengths) + " |"]
    lines.append("|---|" + "---|" * len(lengths))
    for form in ("plain", "thinking"):
        for kind in KINDS:
            cells = [_cell(scores[form].get(kind)) for scores in lengths.values()]
            if any(cells):
                name = kind.replace("_", " ") + (", thinking" if form == "thinking" else "")
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| recall over | " + " | ".join(f"rows of {length}" for length in lengths) + " |"]
    lines.append("|---|" + "---|" * len(lengths))
    for low, high in zip(DISTANCES, (*DISTANCES[1:], None), strict=True):
        cells = [
            _cell({str(k): v for k, v in scores["recall_by_distance"].items()}.get(str(low)))
            for scores in lengths.values()
        ]
        if any(cells):
            name = f"{low} to {high} tokens" if high else f"{low} tokens and more"
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    drafts = document["drafts"]
    width = len(drafts["by_position"])
    lines += [
        "",
        "| draft | " + " | ".join(str(i + 1) for i in range(width)) + " | mean | where all fit |",
        "|---|" + "---|" * (width + 2),
        "| accepted, given those before | "
        + " | ".join(f"{value:.2f}" for value in drafts["by_position"])
        + f" | {drafts['mean_accepted']:.2f} | {drafts['mean_where_all_fit']:.2f} |",
        "",
        f"Accepted of {width} by kind of answer: "
        + ", ".join(f"{k.replace('_', ' ')} {m:.1f}" for k, (m, _) in drafts["by_kind"].items())
        + f". Calibration error of the survival {drafts['calibration_error']['fitted']:.3f} "
        f"(without temperatures {drafts['calibration_error']['plain']:.3f}).",
    ]
    return "\n".join(lines)


def _cell(counts: Sequence[int] | None) -> str:
    return f"{counts[0] / counts[1]:.2f} ({counts[1]})" if counts else ""


def put_between(text: str, mark: str, body: str) -> str:
    """Returns a text with what stands between two marks replaced. Raises: ValueError without."""
    head, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- /{mark} -->")
    if not begin or not end:
        raise ValueError(f"the card has no marks for {mark}")
    return f"{head}{begin}{body}\n{end}{tail}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="of the run, for its log")
    parser.add_argument("--model", type=Path, default=DEFAULT_TO)
    parser.add_argument("--plots", type=Path, default=PLOTS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    document, found = measure(options.model)
    (options.model / SCORES).write_text(json.dumps(document, indent=1) + "\n")
    card = options.model / CARD
    if card.exists():
        card.write_text(put_between(card.read_text(), "scores", tables(document)))
    options.plots.mkdir(parents=True, exist_ok=True)
    fitted = np.array(document["drafts"]["temperatures"])
    plots.calibration(found, fitted, options.plots / "pelagos-mini-confidence.svg")
    log = options.out / LOG
    if log.exists():
        plots.training(log, options.plots / "pelagos-mini-training.svg")
    print(tables(document))


if __name__ == "__main__":
    main()
