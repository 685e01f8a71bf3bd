"""Makes the small model from nothing: backbone, draft head, confidences, vision, files, figures.

    python -m services.engine.training

Each part is skipped when its result lies in the run's folder already; the backbone goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from services.engine.training import acceptance, draft, export, report, train, vision
from services.engine.training.tokenizer import DEFAULT_FILE


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "services.engine.training", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=train.DEFAULT_OUT, help="of the run")
    parser.add_argument("--to", type=Path, default=export.DEFAULT_TO, help="of the checkpoint")
    parser.add_argument("--plots", type=Path, default=report.PLOTS)
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--steps", type=int, default=train.DEFAULT_STEPS)
    parser.add_argument("--draft-steps", type=int, default=draft.DEFAULT_STEPS)
    parser.add_argument("--vision-steps", type=int, default=vision.DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    out: Path = options.out

    def part(name: str, run: Callable[[], object]) -> None:
        logging.info("==> %s", name)
        began = time.monotonic()
        run()
        logging.info("    %s: %.0f s", name, time.monotonic() - began)

    part("backbone", lambda: train.run(out, options.tokenizer, options.steps, seed=options.seed))
    if not (out / draft.DRAFT).exists():
        part("draft head", lambda: draft.run(out, options.draft_steps, seed=options.seed))
    if not (out / draft.TEMPERATURES).exists():
        part("confidences", lambda: acceptance.fit(out))
    if not (out / export.VISION).exists():
        part("vision", lambda: vision.run(out, options.vision_steps, seed=options.seed))
    part("checkpoint", lambda: export.export(out, options.to))
    to: Path = options.to
    part("quantised form", lambda: export.quantise(to, to.with_name(f"{to.name}-quantised")))
    figures = ["--out", out, "--model", options.to, "--plots", options.plots]
    part("figures", lambda: report.main([*map(str, figures), "--threads", str(options.threads)]))


if __name__ == "__main__":
    main()
