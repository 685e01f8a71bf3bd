"""What is too much is refused in bounded time, by name, and hurts nobody else (S-06)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from pelagos.so_compiler.v1 import so_compiler_pb2 as pb

from services.common.errors import Failure, Reason
from services.so_compiler.automaton import Budget, BudgetExceeded, UnsupportedPattern, count_states
from services.so_compiler.compiler import Compiler
from services.so_compiler.config import CacheLimits, GrammarLimits, SoCompilerConfig
from services.so_compiler.schema_check import check_schema
from services.so_compiler.worker_pool import Artifact, Job, WorkerPool

LIMITS = GrammarLimits()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def refusal(schema: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        check_schema(json.dumps(schema), LIMITS)
    return caught.value


def test_ur_65_states_are_counted_inside_the_construction() -> None:
    assert count_states("[ab]*a[ab]{13}", Budget(200_000), is_search=False) >= 2**13
    with pytest.raises(BudgetExceeded):
        count_states("[ab]*a[ab]{13}", Budget(4096), is_search=False)
    assert count_states("(a|a){1,5000}", Budget(200_000), is_search=False) >= 5000
    failure = refusal(
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "[ab]*a[ab]{40}"}}}
    )
    assert failure.reason is Reason.GRAMMAR_BUDGET
    assert failure.metadata["path"] == "$.properties.a.pattern"


@pytest.mark.parametrize(
    "pattern", ["(a{1,100}){1,100}", "a{100000}", "((((a{10}){10}){10}){10}){10}", "(.*a){1,3000}"]
)
def test_ur_65_small_patterns_with_huge_automata_stop_early(pattern: str) -> None:
    budget = Budget(200_000)
    with pytest.raises(BudgetExceeded):
        count_states(pattern, budget, is_search=True)
    assert budget.num_states <= 200_001


def test_states_of_all_patterns_of_a_schema_share_one_budget() -> None:
    pattern = "[ab]*a[ab]{12}"
    properties = {f"p{i}": {"type": "string", "pattern": pattern} for i in range(60)}
    failure = refusal({"type": "object", "properties": properties})
    assert failure.reason is Reason.GRAMMAR_BUDGET


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(", "[z-a]", r"\bfoo"])
def test_patterns_that_are_not_regular_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        count_states(pattern, Budget(1000), is_search=True)


def test_a_counted_automaton_is_no_larger_than_the_pattern_asks() -> None:
    assert count_states("^ab?c$", Budget(100), is_search=True) <= 5
    assert count_states("^[ -~]{1,200}$", Budget(1000), is_search=True) <= 201


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (nested(200), Reason.GRAMMAR_BUDGET),
        (
            {"anyOf": [{"type": "integer", "minimum": i} for i in range(12_000)]},
            Reason.GRAMMAR_BUDGET,
        ),
        ({"enum": list(range(1001))}, Reason.GRAMMAR_BUDGET),
        ({"type": "array", "minItems": 100_001}, Reason.GRAMMAR_BUDGET),
        ({"type": "string", "pattern": "a" * 5000}, Reason.GRAMMAR_BUDGET),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, Reason.SCHEMA_UNSUPPORTED),
        ({"$ref": "#/$defs/none"}, Reason.SCHEMA_UNSUPPORTED),
        ({"$ref": "https://example.org/s.json"}, Reason.SCHEMA_UNSUPPORTED),
        ({"type": "text"}, Reason.SCHEMA_UNSUPPORTED),
        ({"type": "string", "maxLength": -1}, Reason.SCHEMA_UNSUPPORTED),
        ([], Reason.SCHEMA_UNSUPPORTED),
    ],
)
def test_ur_64_hostile_schemas_are_refused(schema: Any, reason: Reason) -> None:
    failure = refusal(schema)
    assert failure.reason is reason
    assert failure.metadata["path"].startswith("$")


def test_ur_64_mutual_references_are_followed_once_each() -> None:
    """A web of references has exponentially many paths; each is expanded once per ancestry."""
    defs = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(12)] + [{"type": "null"}]}
        for i in range(12)
    }
    failure = refusal({"$ref": "#/$defs/d0", "$defs": defs})
    assert failure.reason is Reason.GRAMMAR_BUDGET


def test_a_recursive_schema_within_bounds_is_fine() -> None:
    schema = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    }
    checked = check_schema(json.dumps(schema), LIMITS)
    assert json.loads(checked.text) == schema


# ---- children -------------------------------------------------------------------------------


HARD = json.dumps({"type": "string", "pattern": "[ab]*a[ab]{30}"})
UNBOUNDED = {"max_states": 2**60, "max_work": 2**60, "wall_s": 100.0}


@pytest.mark.parametrize(
    "limits",
    [
        # Our own counts are switched off: only the kernel's limits are left to stop it.
        GrammarLimits(**UNBOUNDED, cpu_s=0.5, memory_bytes=2**40),
        GrammarLimits(**UNBOUNDED, cpu_s=100.0, memory_bytes=2**23),
    ],
    ids=["cpu", "memory"],
)
async def test_ur_64_a_job_over_the_kernels_limits_ends_alone(limits: GrammarLimits) -> None:
    pool = WorkerPool(2, limits)
    easy = Job(pb.GRAMMAR_TYPE_JSON_OBJECT, "", {})
    try:
        first = await pool.compile(easy, 100.0)
        hard = asyncio.ensure_future(
            pool.compile(Job(pb.GRAMMAR_TYPE_JSON_SCHEMA, HARD, {}), 100.0)
        )
        others = [await pool.compile(easy, 100.0) for _ in range(5)]
        assert all(other.data == first.data for other in others)
        with pytest.raises(Failure) as caught:
            await hard
        assert caught.value.reason is Reason.GRAMMAR_BUDGET
        assert (await pool.compile(easy, 100.0)).data == first.data
    finally:
        await pool.close()
    assert pool.num_processes == 0


async def test_a_child_that_is_stopped_is_replaced() -> None:
    import os
    import signal

    pool = WorkerPool(1, LIMITS)
    try:
        easy = Job(pb.GRAMMAR_TYPE_JSON_OBJECT, "", {})
        await pool.compile(easy, 60.0)
        (process,) = pool._processes
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Failure) as caught:
            await pool.compile(easy, 0.2)
        assert caught.value.reason is Reason.GRAMMAR_BUDGET
        assert process.returncode is not None
        assert (await pool.compile(easy, 60.0)).data
        assert pool.num_processes == 1
    finally:
        await pool.close()


async def test_a_child_that_died_idle_is_no_fault_of_the_next_grammar() -> None:
    pool = WorkerPool(1, LIMITS)
    try:
        easy = Job(pb.GRAMMAR_TYPE_JSON_OBJECT, "", {})
        first = await pool.compile(easy, 60.0)
        for num_lost in (1, 2):
            (process,) = pool._processes
            process.kill()  # not yet noticed when the next job comes
            assert (await pool.compile(easy, 60.0)).data == first.data
            assert (pool.num_lost, pool.num_processes) == (num_lost, 1)
    finally:
        await pool.close()


async def test_cancelling_the_last_reader_kills_the_child_at_work() -> None:
    import os
    import signal

    pool = WorkerPool(1, LIMITS)
    compiler = Compiler(SoCompilerConfig(), pool, "1")
    try:
        await compiler.compile(pb.CompileRequest(type=pb.GRAMMAR_TYPE_JSON_OBJECT))
        (process,) = pool._processes
        os.kill(process.pid, signal.SIGSTOP)
        request = pb.CompileRequest(type=pb.GRAMMAR_TYPE_REGEX, source="abc")
        readers = [asyncio.ensure_future(compiler.compile(request)) for _ in range(3)]
        await until(lambda: pool.num_busy == 1)
        assert compiler.num_flights == 1  # one flight for all three
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await until(lambda: compiler.num_flights == 0)
        assert process.returncode is not None
    finally:
        await compiler.close()


# ---- cache ----------------------------------------------------------------------------------


class CountingPool(WorkerPool):
    """Answers without children."""

    def __init__(self, size: int = 10) -> None:
        super().__init__(1, LIMITS)
        self.num_jobs = 0
        self.size = size
        self.failure: Failure | None = None

    async def compile(self, job: Job, wall_s: float) -> Artifact:
        self.num_jobs += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return Artifact(b"x" * self.size, [], 1)


def regex(source: str, tenant: str = "a") -> pb.CompileRequest:
    return pb.CompileRequest(type=pb.GRAMMAR_TYPE_REGEX, source=source, tenant=tenant)


async def test_equal_constraints_are_compiled_once_per_tenant() -> None:
    pool = CountingPool()
    compiler = Compiler(SoCompilerConfig(), pool, "1")
    answers = await asyncio.gather(*(compiler.compile(regex("a")) for _ in range(8)))
    assert pool.num_jobs == 1
    assert len({answer.key for answer in answers}) == 1
    assert (await compiler.compile(regex("a"))).cached
    # Another tenant learns nothing from it, and has another key (S-02).
    other = await compiler.compile(regex("a", "b"))
    assert not other.cached
    assert other.key != answers[0].key


async def test_refusals_are_remembered_for_a_minute() -> None:
    pool = CountingPool()
    pool.failure = Failure(Reason.GRAMMAR_BUDGET, "too much", {"path": "$"})
    compiler = Compiler(SoCompilerConfig(), pool, "1")
    for _ in range(3):
        with pytest.raises(Failure, match="too much"):
            await compiler.compile(regex("a"))
    assert pool.num_jobs == 1
    pool.failure = Failure(Reason.INTERNAL, "ours")
    for _ in range(2):
        with pytest.raises(Failure):
            await compiler.compile(regex("b"))
    assert pool.num_jobs == 3


async def test_s_14_a_tenant_that_floods_the_cache_evicts_its_own() -> None:
    config = SoCompilerConfig(cache=CacheLimits(max_bytes=1000, max_entries=100))
    pool = CountingPool(size=50)
    compiler = Compiler(config, pool, "1")
    victims = [await compiler.compile(regex(f"v{i}", "victim")) for i in range(5)]
    for i in range(200):
        await compiler.compile(regex(f"f{i}", "flood"))
    assert compiler.cache.num_bytes <= 1000
    for victim in victims:
        assert compiler.find(victim.key)
    assert not (await compiler.compile(regex("f0", "flood"))).cached


async def test_one_tenant_cannot_take_every_place_in_the_queue() -> None:
    config = SoCompilerConfig(max_concurrent_per_tenant=2)
    compiler = Compiler(config, CountingPool(), "1")
    tasks = [asyncio.ensure_future(compiler.compile(regex(f"{i}"))) for i in range(5)]
    await asyncio.sleep(0)
    other = await compiler.compile(regex("x", "b"))
    assert other.key
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Failure)]
    assert len(refused) == 3
    assert {failure.reason for failure in refused} == {Reason.OVERLOADED}
