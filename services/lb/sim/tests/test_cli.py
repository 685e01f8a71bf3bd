"""The `pelagos sim` command."""

import json

from services.lb.sim import cli


def test_the_tables_are_those_of_t_pre_5_and_t_dec_2(capsys):
    assert cli.main(["--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert tables["requests"] == 12_031
    waits = {row["policy"]: row["mean wait s"] for row in tables["prefill, 16 engines, load 0.85"]}
    assert waits == {
        "one shared FIFO": 3.86,
        "buckets, steal any": 4.19,
        "buckets, steal shorter": 5.06,
        "buckets, steal off": 6.65,
        "round-robin": 69.89,
    }
    rows = {row["policy"]: row for row in tables["decode, 64 ranks"]}
    assert rows["pelagos"] == {
        "policy": "pelagos",
        "KV max/mean": 1.706,
        "requests max/mean": 1.201,
    }


def test_a_table_is_printed_with_a_heading_and_a_row_per_policy(capsys):
    assert cli.main(["prefill", "--engines", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("prefill, 8 engines")
    assert "mean wait s" in lines[3]
    assert len(lines) == 9


def test_what_cannot_be_done_is_said_in_one_line(capsys, tmp_path):
    assert cli.main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert cli.main(["prefill", "--engines", "2"]) == 2
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert cli.main(["--trace", str(empty)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
