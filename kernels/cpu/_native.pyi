"""The crate `native`. Buffers are contiguous float32; the last ones are written."""

from numpy import float32
from numpy.typing import NDArray

_Floats = NDArray[float32]

MOST_STREAMS: int

def rms_norm(
    rows: _Floats, width: int, weight: _Floats | None, eps: float, out: _Floats, /
) -> None: ...
def hc_mixes(
    h: _Floats,
    z: _Floats,
    base: _Floats,
    scale: _Floats,
    streams: int,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    pre: _Floats,
    post: _Floats,
    comb: _Floats,
    /,
) -> None: ...
def hc_close(
    y: _Floats,
    h: _Floats,
    post: _Floats,
    comb: _Floats,
    pre: _Floats,
    weight: _Floats,
    streams: int,
    eps: float,
    out: _Floats,
    x: _Floats,
    /,
) -> None: ...
