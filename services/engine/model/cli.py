"""`pelagos model inspect DIR`: what a checkpoint holds, and on which cards it fits.

Reads configuration and headers only, no weights. Source: model.md, sections 18 and 19.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.engine.model.config import ConfigError, ModelConfig

# Memory of common accelerators, GB, and the share of it that weights may take: the rest is for
# caches, activations and the graphs.
CARDS = {
    "24 GB (RTX 4090)": 24,
    "48 GB (L40S)": 48,
    "80 GB (A100, H100)": 80,
    "96 GB (H20)": 96,
    "141 GB (H200)": 141,
    "192 GB (B200, MI300X)": 192,
}
WEIGHTS_SHARE = 0.75
_SPARE_SHARE = 0.1  # activations, graphs, fragments: neither weights nor caches
_MOST_RANKS = 384


@dataclass(frozen=True)
class Sizes:
    """Bytes by what they are for."""

    experts: int
    tables: int
    vision: int
    draft_experts: int
    dense: int

    @property
    def total(self) -> int:
        return self.experts + self.tables + self.vision + self.draft_experts + self.dense

    def per_rank(self, num_ranks: int) -> float:
        """Bytes on one rank: experts split, n-gram tables elsewhere, the rest on every rank."""
        shared = self.experts + self.draft_experts
        return self.dense + shared / num_ranks


def sizes_of(tensors: dict[str, int]) -> Sizes:
    """Sorts tensors (name: bytes) by what they are for."""
    found: Counter[str] = Counter()
    for name, count in tensors.items():
        if ".ffn.experts." in name:
            kind = "draft_experts" if name.startswith("mtp.") else "experts"
        elif ".engram.embed." in name:
            kind = "tables"
        elif name.startswith(("vision.", "aligner.", "image_")):
            kind = "vision"
        else:
            kind = "dense"
        found[kind] += count
    return Sizes(
        found["experts"], found["tables"], found["vision"], found["draft_experts"], found["dense"]
    )


def smallest_ep(sizes: Sizes, card_gb: float) -> int | None:
    """Returns the fewest ranks whose share fits a card, None when no number does."""
    room = card_gb * 1e9 * WEIGHTS_SHARE
    for ranks in range(1, _MOST_RANKS + 1):
        if sizes.per_rank(ranks) <= room:
            return ranks
    return None


@dataclass(frozen=True)
class Fit:
    """How a model lies on one kind of card. Bytes per rank, as the checkpoint stores them."""

    smallest_ep: int
    weights_bytes: int
    kv_tokens: int  # Block KV that the rest of a card holds


def fit_of(sizes: Sizes, card_gb: float, block_bytes: int, block_tokens: int) -> Fit | None:
    """Returns the smallest group on a kind of card, None when no group fits."""
    ranks = smallest_ep(sizes, card_gb)
    if ranks is None:
        return None
    weights = sizes.per_rank(ranks)
    room = max(0.0, card_gb * 1e9 * (1 - _SPARE_SHARE) - weights)
    return Fit(ranks, int(weights), int(room // block_bytes) * block_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pelagos model`."""
    parser = argparse.ArgumentParser(prog="pelagos model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what a checkpoint holds and where it fits")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--json", action="store_true", help="machine-readable")
    random = commands.add_parser("make-random", help="write a valid checkpoint of random weights")
    random.add_argument("directory", type=Path)
    random.add_argument("--preset", default="tiny", choices=["tiny", "nano", "tiny-fullvocab"])
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--form", choices=["bf16", "quantised"], default=None)
    random.add_argument("--tokenizer", type=Path, help="a tokenizer.json to lay beside it")
    args = parser.parse_args(argv)
    try:
        if args.command == "make-random":
            return _make_random(args)
        return _inspect(args.directory, args.json)
    except ModuleNotFoundError as error:
        print(f"pelagos model: needs the engine extra ({error.name})", file=sys.stderr)
        return 2
    except (ConfigError, ValueError, OSError) as error:
        print(f"pelagos model: {error}", file=sys.stderr)
        return 1


def _make_random(args: argparse.Namespace) -> int:
    from services.engine.model.checkpoint import make_random_checkpoint
    from services.engine.model.presets import PRESETS

    quantised = None if args.form is None else args.form == "quantised"
    make_random_checkpoint(
        PRESETS[args.preset],
        args.seed,
        args.directory,
        quantised=quantised,
        tokenizer=args.tokenizer,
    )
    print(f"wrote {args.directory}")
    return 0


def _inspect(directory: Path, as_json: bool) -> int:
    from services.engine.model.cache import kv_layout
    from services.engine.model.checkpoint import CheckpointReader, read_entries
    from services.engine.model.names import tensors
    from services.engine.model.numerics import Numerics

    config = ModelConfig.load(directory)
    CheckpointReader(directory, config).close()  # names, shapes, types and file sizes
    entries = read_entries(directory)
    sizes = sizes_of({name: entry.end - entry.begin for name, entry in entries.items()})
    parameters = sum(math.prod(spec.shape) for spec in tensors(config).values())
    layout = kv_layout(
        config, Numerics(quantised_kv=config.quantization is not None), model_id="", weights_id=""
    )
    facts = {
        "form": "quantised" if config.quantization is not None else "bf16",
        "parameters": parameters,
        "files": len({entry.path for entry in entries.values()}),
        "tensors": len(entries),
        "bytes": {
            "total": sizes.total,
            "routed experts": sizes.experts,
            "draft experts": sizes.draft_experts,
            "n-gram tables": sizes.tables,
            "vision": sizes.vision,
            "dense": sizes.dense,
        },
        "block_bytes": layout.block_bytes,
        "state_bytes": layout.state_bytes,
        "tables_elsewhere_bytes": sizes.tables,  # rows over the group's memory or the host's
        "cards": {
            card: None if fit is None else asdict(fit)
            for card, gb in CARDS.items()
            for fit in [fit_of(sizes, gb, layout.block_bytes, config.system.block_tokens)]
        },
    }
    print(json.dumps(facts, indent=2) if as_json else _told(config, facts))
    return 0


def _told(config: ModelConfig, facts: dict[str, Any]) -> str:
    text = config.text
    lines = [
        f"{text.num_hidden_layers} layers ({text.n_encoder} encoder), hidden {text.hidden_size}, "
        f"{text.n_routed_experts} experts, top {text.num_experts_per_tok}; "
        f"{text.num_nextn_predict_layers} draft layers; {facts['form']}",
        f"{facts['parameters'] / 1e6:,.1f} M parameters, {facts['tensors']} tensors "
        f"in {facts['files']} files",
    ]
    lines += [f"  {name:<16} {count / 1e6:>12,.2f} MB" for name, count in facts["bytes"].items()]
    lines.append(
        f"a block of {config.system.block_tokens} tokens: {facts['block_bytes']:,} B; "
        f"a sequence's state: {facts['state_bytes']:,} B"
    )
    lines.append("on cards (n-gram tables lie elsewhere; a tenth is left for activations):")
    for card, fit in facts["cards"].items():
        fits = "does not fit"
        if fit is not None:
            fits = (
                f"EP {fit['smallest_ep']:<4} {fit['weights_bytes'] / 1e9:8.2f} GB of weights, "
                f"KV of {fit['kv_tokens']:,} tokens per rank"
            )
        lines.append(f"  {card:<22} {fits}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
