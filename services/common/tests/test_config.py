"""Configuration: four sources, the last wins, and everything wrong stops the start."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from services.common.config import (
    ConfigError,
    from_mapping,
    load,
    require,
    secret,
    to_document,
    usage,
    weakened,
    weakens,
)


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class Inner:
    etcd: str = ""
    wait_s: float = 2.0
    open_to_all_is_insecure: bool = weakens(False, "everybody may connect")


def _inner() -> Inner:
    return Inner(etcd="from-factory")


@dataclass(frozen=True)
class Config:
    listen: str = "127.0.0.1:0"
    num_ranks: int = 2
    step_budget_ms: float = 30.0
    async_steps: bool = True
    mode: Mode = Mode.SAFE
    level: Literal["low", "high"] = "low"
    folder: Path = Path("data")
    buckets: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    limit: int | None = None
    token: str = secret("")
    inner: Inner = field(default_factory=_inner)

    def __post_init__(self) -> None:
        require(self.num_ranks > 0, f"num_ranks must be above 0, not {self.num_ranks}")


def of(*argv: str, **environ: str) -> Config:
    return load(Config, "prefill", argv, environ, ("prefill-lb",)).config


def test_defaults_need_nothing() -> None:
    assert of() == Config()
    assert of().inner.etcd == "from-factory"


def test_the_last_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "a file.yaml"
    file.write_text("num_ranks: 3\nstep_budget_ms: 10\ninner: {wait_s: 1, etcd: file}\n")
    config = of(
        f"--config={file}",
        "--num-ranks",
        "5",
        PELAGOS_PREFILL_NUM_RANKS="4",
        PELAGOS_PREFILL_STEP_BUDGET_MS="20",
    )
    assert (config.num_ranks, config.step_budget_ms) == (5, 20.0)
    assert (config.inner.wait_s, config.inner.etcd) == (1.0, "file")


def test_a_nested_value_keeps_its_siblings_of_the_factory() -> None:
    assert of("--inner.wait_s=7").inner == Inner(etcd="from-factory", wait_s=7.0)


def test_every_type_is_read_from_text() -> None:
    config = of(
        *("--mode", "fast", "--level=high", "--folder=/x y", "--buckets=3,4", "--names", "a, b"),
        *("--weights=a=1,b=2.5", "--limit=none", "--no-async-steps", "--inner.etcd=h:1"),
        PELAGOS_PREFILL_LIMIT="9",
        PELAGOS_PREFILL_INNER_WAIT_S="0.5",
    )
    assert config.mode is Mode.FAST
    assert config.level == "high"
    assert config.folder == Path("/x y")
    assert config.buckets == (3, 4)
    assert config.names == ["a", "b"]
    assert config.weights == {"a": 1.0, "b": 2.5}
    assert config.limit is None
    assert config.async_steps is False
    assert config.inner == Inner("h:1", 0.5)
    assert of("--async-steps").async_steps is True
    assert of("--async-steps", "false").async_steps is False


@pytest.mark.parametrize(
    ("argv", "environ", "yaml", "text"),
    [
        (["--num_rank=1"], {}, "", "unknown flag --num_rank (did you mean num_ranks?)"),
        ([], {"PELAGOS_PREFILL_NUMRANKS": "1"}, "", "unknown variable PELAGOS_PREFILL_NUMRANKS"),
        ([], {}, "num_rank: 1", "unknown key num_rank (did you mean num_ranks?)"),
        ([], {}, "inner: {etc: x}", "unknown key inner.etc"),
        (["--num-ranks=two"], {}, "", "'two' is not int"),
        (["--num-ranks=1.5"], {}, "", "'1.5' is not int"),
        (["--step-budget-ms=nan"], {}, "", "nan is not float"),
        (["--async-steps=maybe"], {}, "", "'maybe' is not bool"),
        (["--mode=slow"], {}, "", "'slow' is not one of fast, safe"),
        (["--level=mid"], {}, "", "'mid' is not one of low, high"),
        (["--num-ranks=0"], {}, "", "num_ranks must be above 0, not 0"),
        (["--num-ranks"], {}, "", "needs a value"),
        (["what"], {}, "", "unexpected argument 'what'"),
        ([], {}, "num_ranks: '3'", "num_ranks: '3' is not int"),
        ([], {}, "num_ranks: true", "num_ranks: True is not int"),
        ([], {}, "buckets: [1, a]", "buckets[1]: 'a' is not int"),
        ([], {}, "inner: 3", "inner must be a mapping"),
        ([], {}, "- a", "not a mapping"),
        ([], {}, "a: b: c", "is not YAML"),
        (["--config=/does/not/exist"], {}, "", "cannot read /does/not/exist"),
    ],
)
def test_what_is_wrong_stops_the_start_with_one_line(
    argv: list[str], environ: dict[str, str], yaml: str, text: str, tmp_path: Path
) -> None:
    if yaml:
        (tmp_path / "c.yaml").write_text(yaml)
        argv = [*argv, "--config", str(tmp_path / "c.yaml")]
    with pytest.raises(ConfigError) as caught:
        of(*argv, **environ)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_of_a_service_with_a_longer_name_are_not_ours() -> None:
    assert of(PELAGOS_PREFILL_LB_LISTEN="x", PELAGOS_DECODE_LISTEN="y", HOME="/") == Config()


def test_secrets_are_not_shown() -> None:
    config = of("--token=abc123")
    assert config.token == "abc123"
    assert "abc123" not in str(to_document(config))
    assert to_document(config)["token"] == "(set)"
    assert to_document(Config())["token"] == ""
    assert "abc123" in str(to_document(config, redact=False))


def test_a_document_read_back_is_the_same_configuration() -> None:
    config = of("--mode=fast", "--buckets=7", "--weights=a=1", "--inner.etcd=e")
    assert from_mapping(Config, to_document(config, redact=False)) == config


def test_a_weaker_choice_is_said_aloud() -> None:
    assert weakened(Config()) == []
    config = of("--inner.open_to_all_is_insecure")
    assert weakened(config) == ["inner.open_to_all_is_insecure: everybody may connect"]


def test_a_required_key_must_be_given() -> None:
    @dataclass(frozen=True)
    class Needy:
        model: str

    globals()["Needy"] = Needy  # type hints are looked up in the module
    with pytest.raises(ConfigError, match="model is required"):
        load(Needy, "x", [], {})
    assert load(Needy, "x", ["--model=m"], {}).config.model == "m"


def test_check_and_print_are_asked_for_by_flags() -> None:
    assert load(Config, "prefill", ["--check-config"], {}).check_only
    assert load(Config, "prefill", ["--print-config"], {}).print_only
    assert "--inner.wait_s" in usage(Config, "prefill")
    assert "default 30.0" in usage(Config, "prefill")
