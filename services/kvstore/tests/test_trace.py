"""Trace replay with the published ratios, and the tools over files."""

import os
from pathlib import Path

import pytest

from services.kvstore import cli
from services.kvstore.backends.local import LocalBackend, LocalBackendConfig
from services.kvstore.backends.segment_index import footer
from services.kvstore.inspect_files import shards_in
from services.kvstore.placement import SHARD_HEADER_BYTES
from services.kvstore.tests.backend_suite import put
from services.kvstore.trace import TraceRequest, plot, read_trace, replay

EXPECTED = {
    "conversation": {None: 0.3664, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546},
    "synthetic": {None: 0.6396, 10_000: 0.4239, 30_000: 0.6242, 50_000: 0.6396},
}
TOKENS = {"conversation": 0.3736, "synthetic": 0.6512}


def folder() -> Path:
    """Returns the folder of the shared data sets, as the simulator finds it."""
    configured = os.environ.get("PELAGOS_DATA")
    base = Path(configured) if configured else Path(__file__).parents[4] / "shared" / "data"
    return base / "kv-traces"


@pytest.fixture(scope="module", params=EXPECTED)
def trace(request):
    return request.param, read_trace(folder() / f"{request.param}_trace.jsonl")


def test_published_hit_ratios_at_every_capacity(trace) -> None:
    name, requests = trace
    for capacity, ratio in EXPECTED[name].items():
        found = replay(requests, capacity)
        assert round(found.blocks, 4) == ratio, capacity
        if capacity is None:
            assert round(found.tokens, 4) == TOKENS[name]


def test_a_hit_is_the_leading_run_and_leaves_are_evicted_first() -> None:
    requests = [
        TraceRequest(0, 2048, (1, 2, 3, 4)),
        TraceRequest(1, 2048, (1, 2, 9, 4)),
        TraceRequest(2, 1000, (1, 2)),
    ]
    found = replay(requests)
    assert (found.num_blocks, found.num_hit_blocks) == (10, 4)
    assert (found.num_tokens, found.num_hit_tokens) == (5096, 2 * 512 + 1000)
    # Room for two: the heads of the last prefix stay.
    assert replay(requests, capacity=2).num_hit_blocks == 4
    assert replay(requests, capacity=1).num_hit_blocks == 2


def test_a_time_to_live_counts_from_the_last_access() -> None:
    requests = [TraceRequest(t * 1000, 512, (1,)) for t in (0, 5, 10, 21)]
    assert replay(requests, ttl_s=10).num_hit_blocks == 2
    assert "unlimited" in plot([replay(requests, ttl_s=10)])


def test_a_bad_line_names_its_number(tmp_path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp":1,"input_length":2,"hash_ids":[1]}\n{"x":1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_trace(file)
    assert cli.main(["trace", str(file)]) == 1


async def test_ls_and_verify_read_the_files_of_a_store(tmp_path, capsys) -> None:
    config = LocalBackendConfig(tmp_path / "s", 16 * 4096, 8 * 4096, payload_bytes=3000)
    backend = await LocalBackend.open(config)
    for number in range(5):
        await put(backend, number)
    await backend.close()
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("5 shards\n")
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "5 shards, 0 faults\n"
    segment = tmp_path / "s" / "seg-0000"
    data = bytearray(segment.read_bytes())
    data[4096 + 1000] ^= 1
    segment.write_bytes(data)
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert "FAULT: checksum" in capsys.readouterr().out
    assert cli.main(["ls", str(tmp_path / "nowhere")]) == 1


@pytest.mark.parametrize("num_shards", [1, 32, 40, 100])
async def test_the_headers_that_end_a_segment_are_no_shards(tmp_path, capsys, num_shards) -> None:
    config = LocalBackendConfig(tmp_path / "s", 2 * 4096, 2 * 4096, payload_bytes=3000)
    backend = await LocalBackend.open(config)
    await put(backend, 1)
    await backend.close()
    (found,) = shards_in(tmp_path / "s", verify=True)
    data = (tmp_path / "s" / found.file).read_bytes()
    slot = data[found.offset : found.offset + 4096]
    shared = tmp_path / "mount" / "w-1"
    shared.mkdir(parents=True)
    header = slot[:SHARD_HEADER_BYTES]
    (shared / "seg-0001").write_bytes(slot * num_shards + footer([header] * num_shards))
    assert cli.main(["verify", str(shared)]) == 0
    assert capsys.readouterr().out == f"{num_shards} shards, 0 faults\n"
