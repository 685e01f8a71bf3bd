"""`pelagos model`: what it tells about a checkpoint."""

from __future__ import annotations

import json
import math

import pytest

from services.common.cli import main
from services.engine.model.cli import fit_of, sizes_of, smallest_ep
from services.engine.model.names import stored, tensors
from services.engine.model.presets import FLASH

pytestmark = pytest.mark.engine

WIDTH = {"BF16": 2, "F32": 4}


def flash_sizes():
    return sizes_of(
        {
            part: math.prod(wanted.shape) * WIDTH.get(wanted.dtypes[0], 1)
            for name, spec in tensors(FLASH).items()
            for part, wanted in stored(name, spec, quantised=True).items()
        }
    )


def test_sizes_of_the_flash_checkpoint():
    sizes = flash_sizes()
    assert sizes.total == pytest.approx(510e9, rel=0.02)
    assert sizes.experts == pytest.approx(289e9, rel=0.01)
    assert sizes.tables == pytest.approx(203e9, rel=0.01)


def test_the_smallest_group_grows_as_cards_shrink_and_may_not_exist():
    sizes = flash_sizes()
    groups = [smallest_ep(sizes, gb) for gb in (192, 141, 80)]
    assert groups == sorted(groups)
    assert groups[0] >= 2
    assert smallest_ep(sizes, 8) is None
    fit = fit_of(sizes, 141, 114688, 128)
    assert fit is not None
    assert fit.smallest_ep == groups[1]
    assert fit.weights_bytes + fit.kv_tokens * 896 < 0.9 * 141e9
    assert fit.kv_tokens > 1_000_000
    assert fit_of(sizes, 8, 114688, 128) is None


def test_inspect_tells_form_sizes_and_fit_and_refuses_what_is_no_model(tmp_path, capsys):
    folder = tmp_path / "a model"
    assert main(["model", "make-random", str(folder), "--preset", "tiny"]) == 0
    capsys.readouterr()
    assert main(["model", "inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "8 layers (4 encoder)" in told
    assert "EP 1" in told
    assert "141 GB (H200)" in told
    assert main(["model", "inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["form"], facts["block_bytes"]) == ("quantised", 4096)
    assert sum(facts["bytes"].values()) == 2 * facts["bytes"]["total"]
    (folder / "config.json").write_text("{}")
    assert main(["model", "inspect", str(folder)]) == 1
    assert "architectures" in capsys.readouterr().err
