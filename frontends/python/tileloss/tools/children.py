"""An environment without secrets, for child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For children, none of which needs one."""
    return {name: value for name, value in environment.items() if name not in SECRETS}
