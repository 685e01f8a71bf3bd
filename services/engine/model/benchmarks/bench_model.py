"""The network beside V4 in `transformers`, at equal sizes, in one run: `make bench-model`.

Both run float32 on one thread of a CPU with the same layers, widths and experts. The sides take
turns; each point is the median of its rounds. Time is the process's CPU time, which a busy machine
does not stretch. Peak memory is that of a process that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from services.engine.layout import Geometry
from services.engine.model.cache import geometry, kv_layout
from services.engine.model.checkpoint import RandomSource
from services.engine.model.config import ModelConfig, RopeScaling, SystemConfig, TextConfig
from services.engine.model.network import load_network
from services.engine.model.numerics import Numerics
from services.engine.model.runner import TorchRunner
from services.engine.requests import Sampling, Tokens
from services.engine.runner import DecodeBatch, DecodeRow, PrefillBatch, PrefillRow, Start

PROMPT = 512
CONTEXT = 160  # tokens before decode steps
BATCHES = (1, 8, 64)
ROUNDS = 3
STEPS = 3  # decode steps of one round

CONFIG = ModelConfig(
    text=TextConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=64,
        sliding_window=128,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 4, 6),
        index_n_heads=8,
        index_head_dim=64,
        index_topk=256,
        candidate_source_layer_id=4,
        candidate_topk_blocks=128,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=4096),
        max_position_embeddings=16384,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=4,
        engram_layer_ids=(),  # V4 has no memory
        engram_num_embeddings=(),
        engram_compressed_vocab_size=4096,
        num_nextn_predict_layers=0,  # and no draft head in that package
        dspark_target_layer_ids=(5, 6, 7),
    ),
    vision=None,
    quantization=None,
    system=SystemConfig(block_tokens=128, keep_tokens=140),
)


class Ours:
    name = "pelagos"

    def __init__(self, truncation: str = "compact", *, invariant: bool = False) -> None:
        net = load_network(CONFIG, RandomSource(CONFIG, 1), Numerics(invariant=invariant))
        self._shape: Geometry = geometry(CONFIG)
        layout = kv_layout(CONFIG, net.numerics, model_id="bench", weights_id="random")
        threads = torch.get_num_threads()
        self._runner = TorchRunner(
            net,
            layout,
            512,
            ring_slots=self._shape.prefill_ring,
            truncation=truncation,
            num_threads=threads,
        )

    def prefill(self, ids: np.ndarray) -> None:
        """Runs a batch of prompts of one length to their first tokens."""
        self._open(ids, 0)
        for seq in range(len(ids)):
            self._runner.close(seq)

    def _open(self, ids: np.ndarray, spare: int) -> None:
        num, rows = ids.shape[1], []
        per = self._shape.num_blocks(num + spare)
        self._tables = [tuple(range(1 + i * per, 1 + (i + 1) * per)) for i in range(len(ids))]
        for seq, prompt in enumerate(ids.tolist()):
            tokens = Tokens(self._shape, array("I", prompt))
            sampling = Sampling(max_tokens=1 << 20)
            self._runner.open(Start(seq, f"r{seq}", tokens, sampling, num, num, seq + 1))
            rows.append(PrefillRow(seq, 0, num, 0, 0, True, self._tables[seq]))
        asyncio.run(self._runner.prefill(PrefillBatch(tuple(rows))))

    def start(self, ids: np.ndarray) -> None:
        """Brings a batch to where decoding begins."""
        self._open(ids, 64)
        self._cached, self._fresh = ids.shape[1], True

    def decode(self, steps: int) -> None:
        async def run() -> None:
            for _ in range(steps):
                rows = tuple(
                    DecodeRow(seq, -1 if self._fresh else seq, self._cached, table, 1)
                    for seq, table in enumerate(self._tables)
                )
                self._fresh = False
                step = self._runner.launch(DecodeBatch(rows, len(rows)))
                self._runner.sample(step, {})
                await self._runner.result(step)
                self._cached += 1

        asyncio.run(run())

    def stop(self) -> None:
        for seq in range(len(self._tables)):
            self._runner.close(seq)


class Theirs:
    name = "transformers V4"

    def __init__(self) -> None:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
        from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

        text = CONFIG.text
        layers = text.num_hidden_layers
        kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
        config = DeepseekV4Config(  # type: ignore[call-arg]
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=text.num_attention_heads,
            head_dim=text.head_dim,
            partial_rotary_factor=text.qk_rope_head_dim / text.head_dim,
            q_lora_rank=text.q_lora_rank,
            o_groups=text.o_groups,
            o_lora_rank=text.o_lora_rank,
            sliding_window=text.sliding_window,
            layer_types=["sliding_attention", *(kinds[i % 2] for i in range(layers - 1))],
            mlp_layer_types=["moe"] * layers,
            index_n_heads=text.index_n_heads,
            index_head_dim=text.index_head_dim,
            index_topk=text.index_topk,
            rope_theta=text.rope_theta,
            compress_rope_theta=text.compress_rope_theta,
            max_position_embeddings=text.max_position_embeddings,
            moe_intermediate_size=text.moe_intermediate_size,
            n_routed_experts=text.n_routed_experts,
            num_experts_per_tok=text.num_experts_per_tok,
            hc_mult=text.hc_mult,
            hc_sinkhorn_iters=text.hc_sinkhorn_iters,
            attn_implementation="eager",
        )
        torch.manual_seed(1)
        self._model = v4.DeepseekV4ForCausalLM(config).eval()

    def prefill(self, ids: np.ndarray) -> None:
        with torch.inference_mode():
            given = torch.from_numpy(ids)
            self._model(input_ids=given, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def start(self, ids: np.ndarray) -> None:
        with torch.inference_mode():
            given = torch.from_numpy(ids)
            self._out = self._model(input_ids=given, use_cache=True, logits_to_keep=1)
            self._cache = self._out.past_key_values

    def decode(self, steps: int) -> None:
        with torch.inference_mode():
            for _ in range(steps):
                ids = self._out.logits[:, -1].argmax(-1, keepdim=True)
                held = self._cache
                self._out = self._model(input_ids=ids, cache=held, use_cache=True)

    def stop(self) -> None:
        del self._out, self._cache


def prompts(batch: int, num: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(3, CONFIG.text.vocab_size, (batch, num))


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(sides: list[Ours | Theirs], rounds: int) -> list[tuple[str, list[float]]]:
    """Returns per point its name and tokens per second of every side."""
    table = []
    ids = prompts(1, PROMPT)
    for side in sides:
        side.prefill(ids)
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, taken in zip(sides, times, strict=True):
            taken.append(seconds(partial(side.prefill, ids)))
    table.append((f"prefill, {PROMPT} tokens", [PROMPT / median(t) for t in times]))
    sides = [sides[0], *sides[2:]]  # decoding has no truncation
    for batch in BATCHES:
        ids = prompts(batch, CONTEXT)
        times = [[] for _ in sides]
        for side in sides:
            side.start(ids)
            side.decode(2)
        for _ in range(rounds):
            for side, taken in zip(sides, times, strict=True):
                taken.append(seconds(partial(side.decode, STEPS)))
        for side in sides:
            side.stop()
        table.append((f"decode, batch {batch}", [batch * STEPS / median(t) for t in times]))
    return table


def peak_mib(side: str) -> float:
    """Returns the peak of a process that runs one side once."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--memory-of", side],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def own_peak_mib() -> float:
    """Returns this process's peak; `getrusage` would give the parent's where that was larger."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory-of", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help="also write the table into this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.memory_of:
        side = Ours() if args.memory_of == "ours" else Theirs()
        side.prefill(prompts(1, PROMPT))
        side.start(prompts(64, CONTEXT))
        side.decode(2)
        print(json.dumps(own_peak_mib()))
        return 0
    sides: list[Ours | Theirs] = [Ours(), Ours("off"), Theirs(), Ours(invariant=True)]
    table = measure(sides, args.rounds)
    lines = [
        "| point | ours | ours, whole decoder half | transformers V4 | ratio | ratio, whole "
        "| ours, batch-invariant | of fast |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rates in table:
        ours, theirs, fixed = rates[0], rates[-2], rates[-1]
        whole = rates[1] if len(rates) == 4 else ours
        lines.append(
            f"| {name}, tokens per CPU second | {ours:.0f} | {whole:.0f} | {theirs:.0f} "
            f"| {ours / theirs:.2f} | {whole / theirs:.2f} | {fixed:.0f} | {fixed / ours:.2f} |"
        )
    peaks = [peak_mib("ours"), peak_mib("theirs")]
    lines.append(f"| peak memory, MiB | {peaks[0]:.0f} | | {peaks[1]:.0f} | | | | |")
    text = "\n".join(lines)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    where = f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}, {commit}"
    print(f"{where}\n\n{text}")
    if args.write:
        document = args.write.read_text() if args.write.exists() else "<!-- table -->\n"
        head, mark, _ = document.partition("<!-- table -->\n")
        args.write.write_text(f"{head}{mark}\n{where}; median of {args.rounds} rounds.\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
