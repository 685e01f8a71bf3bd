"""Settings that every engine process has: which model, how large its pools are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.config import require, weakens
from services.common.cost_model import CostModel
from services.common.tokenizer_id import V41
from services.engine.grammar import GrammarLibrary
from services.engine.layout import Geometry, KvLayout
from services.engine.model.settings import TorchConfig
from services.engine.runner import ModelRunner
from services.engine.sim.config import COST, SimConfig, sim_layout
from services.engine.sim.runner import SimRunner
from services.engine.sim.tokens import Scripts


@dataclass(frozen=True)
class ModelConfig:
    """What computes, and the geometry of its caches."""

    engine: str = "sim"
    model_id: str = "deepseek-v4.1-flash"
    # Whose ids these are. Empty: of the tokenizer beside the checkpoint, else V4.1's, and a
    # network of another vocabulary without a tokenizer takes ids only.
    tokenizer_id: str = ""
    grammar: bool = True  # takes constrained requests, where the backend is installed
    # For constrained output. Empty: the checkpoint's, else the installed package's.
    tokenizer_file: str = ""
    max_model_len: int = 131072
    geometry: Geometry = field(default_factory=Geometry)
    sim: SimConfig = field(default_factory=SimConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    cost: CostModel = COST
    # A test hook: the file names the fault to put into carried state (model/faults.py).
    fault_file: str = weakens("", "state that this engine takes in may be corrupted on purpose")

    def __post_init__(self) -> None:
        require(self.engine in ("sim", "torch"), f"engine is sim or torch, not {self.engine!r}")
        require(self.max_model_len > 1, "max_model_len must be above 1")
        if self.engine == "torch":
            # A network has the shape it was trained in; the simulation takes any.
            object.__setattr__(self, "geometry", self.torch.geometry)
            longest = self.torch.model.text.max_position_embeddings
            object.__setattr__(self, "max_model_len", min(self.max_model_len, longest))
            vocabulary = self.torch.vocabulary
            if vocabulary is not None:
                vocabulary.demand_fits(self.torch.model)

    @property
    def vocabulary_id(self) -> str:
        """Returns whose ids these are, in the codec's own terms."""
        if self.tokenizer_id:
            return self.tokenizer_id
        vocabulary = self.torch.vocabulary if self.engine == "torch" else None
        if vocabulary is not None:
            return vocabulary.tokenizer_id
        return V41 if self.vocab_size == SimConfig.vocab_size else f"ids-{self.vocab_size}"

    @property
    def vocabulary_file(self) -> str:
        """Returns the tokenizer for constrained output; "" for the installed package's."""
        vocabulary = self.torch.vocabulary if self.engine == "torch" else None
        beside = str(vocabulary.path) if vocabulary is not None else ""
        return self.tokenizer_file or beside

    def layout(self) -> KvLayout:
        """Returns the byte layout of the model's caches."""
        if self.engine == "torch":
            from services.engine.model.serve import layout_of  # torch is loaded when asked for

            return layout_of(self.torch, self.model_id)
        return sim_layout(self.model_id, self.geometry)

    @property
    def vocab_size(self) -> int:
        if self.engine == "torch":
            return self.torch.model.text.vocab_size
        return self.sim.vocab_size

    @property
    def image_token_id(self) -> int:
        if self.engine == "torch":
            return self.torch.model.image_token_id
        return self.sim.ids.image

    @property
    def time_scale(self) -> float:
        """Returns how measured step times relate to the cost model's."""
        return self.sim.time_scale if self.engine == "sim" else 1.0

    def grammar_library(self) -> GrammarLibrary:
        """Returns what constrains output in this process."""
        # Ids of a small network are not those of the installed tokenizer.
        file = self.vocabulary_file
        fits = self.vocab_size >= SimConfig.vocab_size or bool(file)
        return GrammarLibrary(
            self.vocabulary_id,
            self.vocab_size,
            self.sim.ids.end if self.engine == "sim" else self.torch.model.eos_token_id,
            file,
            self.grammar and (self.engine == "sim" or fits),
        )

    def make_runner(
        self,
        num_blocks: int,
        *,
        for_prefill: bool,
        max_seqs: int = 64,
        scripts: Scripts | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> ModelRunner:
        """Returns the device of one rank; `max_seqs`: most requests of a decode step."""
        if self.engine == "torch":
            from services.engine.model.serve import runner_of

            runner = runner_of(
                self.torch,
                self.layout(),
                num_blocks,
                for_prefill=for_prefill,
                max_seqs=max_seqs,
            )
            if not self.fault_file:
                return runner
            from services.engine.model.faults import FaultyRunner

            file = Path(self.fault_file)
            return cast(ModelRunner, FaultyRunner(runner, file, for_prefill=for_prefill))
        ring = self.geometry.prefill_ring if for_prefill else self.geometry.ring
        return SimRunner(
            self.layout(),
            self.sim,
            num_blocks,
            ring_slots=ring,
            cost_model=self.cost,
            scripts=scripts,
            clock=clock,
        )
