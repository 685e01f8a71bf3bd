"""What the network computes on, behind one seam: a CPU, or a GPU of CUDA."""

from services.engine.model.device.base import Device, Inbox, Mark, Outbox, Parcel
from services.engine.model.device.cpu import CpuDevice
from services.engine.model.device.graphs import Graphs, size_for, step_sizes
from services.engine.model.device.syncs import SyncCounter

__all__ = [
    "CpuDevice",
    "Device",
    "Graphs",
    "Inbox",
    "Mark",
    "Outbox",
    "Parcel",
    "SyncCounter",
    "open_device",
    "size_for",
    "step_sizes",
]


def open_device(name: str) -> Device:
    """Returns the device of a name such as `cpu` or `cuda:1`.

    Raises: ValueError for a kind that is not known, or a GPU that is not there.
    """
    kind = name.partition(":")[0]
    if kind == "cpu":
        return CpuDevice()
    if kind != "cuda":
        raise ValueError(f"device is cpu or cuda[:N], not {name!r}")
    from services.engine.model.device.cuda import CudaDevice

    return CudaDevice(name)
