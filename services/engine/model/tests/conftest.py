"""Without a GPU Triton's kernels run in its interpreter, which is chosen as they are imported."""

import os

try:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
except ModuleNotFoundError:  # the light environment collects nothing here
    pass
