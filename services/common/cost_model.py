"""Predicts how long a prefill chunk takes, and how long a chunk a time budget allows.

    cost(q, c) = k0 + k1*q + k2*q*c + k3*q^2   nanoseconds, q new tokens after c present

One model for everybody who plans: the prefill balancer (buckets, quotas, leaders), the prefill
engine (chunks, rank choice) and the simulator. `a, b, d, e` of the balancing document are
k3, k2, k1, k0.
Source: engine.md, section 1.5; kvcache-and-balancing.md, section 12.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_MEDIAN_ERROR = 0.10
_MAX_ERROR = 0.50
_MIN_POINTS = 8


@dataclass(frozen=True)
class CostModel:
    """The constants of one engine type, all >= 0.

    The defaults are those of the examples in kvcache-and-balancing.md, section 12.
    """

    k0_ns: float = 200_000.0  # per chunk: launch overhead
    k1_ns: float = 20_000.0  # per new token: GEMMs, experts, capped attention
    k2_ns: float = 1.0  # per pair of new and present token: indexer scoring
    k3_ns: float = 0.5  # per pair of new tokens; theory gives k2/2
    step0_ns: float = 0.0  # per step, however many sequences
    version: int = 0

    def __post_init__(self) -> None:
        for name in ("k0_ns", "k1_ns", "k2_ns", "k3_ns", "step0_ns"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and not negative")

    def cost(self, num_new: int, num_present: int) -> float:
        """Returns the predicted ns of one chunk; 0 for an empty one."""
        if num_new <= 0:
            return 0.0
        q, c = float(num_new), float(num_present)
        return self.k0_ns + self.k1_ns * q + self.k2_ns * q * c + self.k3_ns * q * q

    def charge(self, num_new: int, num_present: int) -> int:
        """Returns the cost in whole ns, so that ledgers come back to exactly zero (T3)."""
        return round(self.cost(num_new, num_present))

    def invert(self, budget_ns: float, num_present: int, num_left: int) -> int:
        """Returns the largest q <= num_left with cost(q, num_present) <= budget_ns.

        The closed form is the stable one (no difference of near-equal roots); float error is then
        repaired, so the result is the exact maximum (T2).
        """
        linear = self.k1_ns + self.k2_ns * num_present
        rest = budget_ns - self.k0_ns
        if num_left <= 0 or rest < 0 or self.cost(1, num_present) > budget_ns:
            return 0
        if linear == 0 and self.k3_ns == 0:
            return num_left
        root = math.sqrt(linear * linear + 4 * self.k3_ns * rest)
        # A root so large that it exceeds num_left needs no repair, and may not fit an int.
        estimate = 2 * rest / (linear + root)
        q = min(num_left, math.floor(estimate))
        while q < num_left and self.cost(q + 1, num_present) <= budget_ns:
            q += 1
        while q > 0 and self.cost(q, num_present) > budget_ns:
            q -= 1
        return q


@dataclass(frozen=True)
class PendingPrompt:
    """A prompt waiting on one rank."""

    num_left: int
    num_present: int


def plan_chunks(
    model: CostModel,
    budget_ns: float,
    queue: Sequence[PendingPrompt],
    min_chunk: int = 128,
    alignment: int = 1,
) -> list[int]:
    """Returns the chunk of each leading prompt of the FIFO that fits one step.

    A step always progresses: an empty one takes min(min_chunk, num_left) even over budget. Only a
    chunk that ends its prompt may be unaligned.
    Source: kvcache-and-balancing.md, section 12, layer 4; cases T-PRE-4a and T-PRE-4b.
    """
    chunks: list[int] = []
    used_ns = 0.0
    for prompt in queue:
        q = model.invert(budget_ns - used_ns, prompt.num_present, prompt.num_left)
        if q < prompt.num_left:
            q -= q % alignment
        if q < min(min_chunk, prompt.num_left):
            if chunks:
                break
            q = min(max(min_chunk, alignment), prompt.num_left)
        chunks.append(q)
        used_ns += model.cost(q, prompt.num_present)
        if q < prompt.num_left:
            break
    return chunks


@dataclass(frozen=True)
class Sample:
    """One profiled step of a single sequence."""

    num_new: int
    num_present: int
    measured_ns: float


@dataclass(frozen=True)
class Fit:
    """What a fit gave. `degenerate`: too few points, k2 and k3 are left at zero."""

    model: CostModel
    median_error: float
    max_error: float
    degenerate: bool


def fit(samples: Sequence[Sample], version: int = 0, tie_k3: bool = True) -> Fit | None:
    """Fits the constants by non-negative least squares on relative errors.

    With `tie_k3`, k3 = k2/2, so that cutting a prompt costs exactly one k0 (T1). Returns None when
    the fit is too poor to replace the previous one, or when there is nothing to fit.
    """
    points = [s for s in samples if s.num_new > 0 and s.measured_ns > 0]
    if not points:
        return None
    degenerate = len(points) < _MIN_POINTS or len({s.num_present for s in points}) < 2
    rows = []
    for s in points:
        q, c = float(s.num_new), float(s.num_present)
        row = [1.0, q]
        if not degenerate:
            row += [q * c + q * q / 2] if tie_k3 else [q * c, q * q]
        rows.append([value / s.measured_ns for value in row])
    solution = _non_negative_least_squares(rows)
    k0, k1, *rest = solution
    k2, k3 = (0.0, 0.0) if degenerate else (rest[0], rest[0] / 2) if tie_k3 else (rest[0], rest[1])
    model = CostModel(k0, k1, k2, k3, 0.0, version)
    errors = [abs(model.cost(s.num_new, s.num_present) / s.measured_ns - 1) for s in points]
    if statistics.median(errors) > _MAX_MEDIAN_ERROR or max(errors) > _MAX_ERROR:
        return None
    return Fit(model, statistics.median(errors), max(errors), degenerate)


def budget_scale(ratios: Sequence[float]) -> float:
    """Returns the median of measured/predicted over the last 64 steps, within [0.5, 2].

    It divides the budget, never the constants: quotas stay comparable across engines.
    """
    if not ratios:
        return 1.0
    return min(2.0, max(0.5, statistics.median(ratios[-64:])))


def _non_negative_least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Minimises sum (row . x - 1)^2 over x >= 0, by trying every support set.

    With at most four unknowns there are fifteen: exact, and no iteration that may not converge.
    Columns are scaled to unit length first, for they differ by ten orders of magnitude.
    """
    width = len(rows[0])
    norms = [math.sqrt(math.fsum(row[j] ** 2 for row in rows)) or 1.0 for j in range(width)]
    scaled = [[row[j] / norms[j] for j in range(width)] for row in rows]
    best: list[float] = [0.0] * width
    best_error = float(len(rows))
    for size in range(1, width + 1):
        for support in itertools.combinations(range(width), size):
            x = _solve_normal_equations(scaled, support)
            if x is None or min(x) < 0:
                continue
            residuals = (
                math.fsum(row[j] * value for j, value in zip(support, x, strict=True)) - 1
                for row in scaled
            )
            error = math.fsum(residual**2 for residual in residuals)
            if error < best_error:
                best_error = error
                best = [0.0] * width
                for j, value in zip(support, x, strict=True):
                    best[j] = value / norms[j]
    return best


def _solve_normal_equations(
    rows: Sequence[Sequence[float]], support: tuple[int, ...]
) -> list[float] | None:
    """Solves (A^T A) x = A^T 1 for the chosen columns; None when they are dependent."""
    n = len(support)
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in support]
        + [math.fsum(row[i] for row in rows)]
        for i in support
    ]
    for col in range(n):
        pivot = max(range(col, n), key=lambda r: abs(matrix[r][col]))
        if abs(matrix[pivot][col]) < 1e-12:
            return None
        matrix[col], matrix[pivot] = matrix[pivot], matrix[col]
        for r in range(n):
            if r != col:
                factor = matrix[r][col] / matrix[col][col]
                matrix[r] = [x - factor * y for x, y in zip(matrix[r], matrix[col], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
