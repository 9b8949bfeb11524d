"""CUDA tensors: on a GPU where TILELOSS_TEST_DEVICE says so, else on the host."""

import os

if os.environ.get("TILELOSS_TEST_DEVICE") == "gpu":
    from cuda_on_gpu import *  # noqa: F403
else:
    from cuda_on_host import *  # noqa: F403
