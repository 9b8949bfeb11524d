"""Child processes: an environment without secrets, and an end with their parent's."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For children, none of which needs one."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """In a child: a signal that reaches its parent before it knows of the child ends both."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)
