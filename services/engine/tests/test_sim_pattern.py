"""Pattern bytes, and the layout's digest: what is fast must say the same as what is plain."""

from array import array
from dataclasses import replace

import pytest

from services.engine.layout import Geometry
from services.engine.sim import pattern
from services.engine.sim.config import ENTRY_BYTES, sim_layout

SIZE = 16


@pytest.mark.parametrize("num", [0, 1, 7, 15, 16])
def test_the_entries_of_a_block_are_those_of_its_tokens_one_by_one(num):
    ids = array("I", [3 + 7919 * index for index in range(num)])
    for tag in pattern.TAGS:
        whole = pattern.entries(tag, b"parent", SIZE, ids.tobytes())
        assert len(whole) == num * ENTRY_BYTES
        assert whole == b"".join(
            pattern.entry(tag, b"parent", SIZE, offset, token_id)
            for offset, token_id in enumerate(ids)
        )


def test_the_signature_depends_on_every_field_of_the_layout():
    layout = sim_layout("tiny", Geometry(block_tokens=16, window=16, keep_tokens=24))
    assert layout.signature == layout.signature
    for change in ({"model_id": "other"}, {"weights_id": "other"}, {"block_bytes": 1 << 20}):
        changed = replace(layout, **change)
        assert changed.signature != layout.signature
        assert replace(changed, **{name: getattr(layout, name) for name in change}) == layout
