"""GPU kernels in Triton; each is tested against its reference by the interpreter on a CPU."""
