"""What every Python test shares: no network, one torch thread a process (pytest-xdist runs several), fixed seeds."""

import os
import random

# Before torch and transformers are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test draws the same numbers, alone or after others."""
    random.seed(0)
    torch.manual_seed(0)
