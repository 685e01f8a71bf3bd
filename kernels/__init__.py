"""Compute ops of the network: plain torch references, and faster versions tested against them."""

from kernels.registry import get, implementations, names

__all__ = ["get", "implementations", "names"]
