#!/usr/bin/env python3
"""What this machine has: GPU, driver, clocks, packages. Exit code 3 without a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = "torch jax jaxlib triton transformers numpy peft optax liger-kernel cut-cross-entropy quack-kernels".split()
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def main() -> int:
    for package in PACKAGES:
        try:
            print(package, version(package))
        except PackageNotFoundError:
            print(package, "is not installed")
    import torch

    from tileloss import library_path
    from tileloss.torch import cross_entropy

    print("library", library_path())
    if not torch.cuda.is_available():
        print("no device: torch sees no GPU")
        return 3
    subprocess.run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"], check=False)
    x = torch.zeros(1, 2, device="cuda", requires_grad=True)
    loss = cross_entropy(x, torch.zeros(1, dtype=torch.int64, device="cuda"))
    print("log 2 is", float(loss))
    return 0


if __name__ == "__main__":
    sys.exit(main())
