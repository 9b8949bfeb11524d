"""Functions whose arguments have become more from release to release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tileloss.testing.case import Refused


def taken(function: Callable[..., Any], usual: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that this release's function has. Raises Refused for one that it lacks whose value is not the usual one, or
    None."""
    there = inspect.signature(function).parameters
    for name, value in arguments.items():
        if name not in there and value is not None and value != usual.get(name):
            raise Refused(f"{name}: not in this release")
    return {name: value for name, value in arguments.items() if name in there}
