"""What of the command `tileloss` needs Python.

command.py      the subcommands, errors and exit codes
arguments.py    arguments that several of them have
gradcheck.py    a case's inputs from the compiled program or a model, outputs by an implementation, and back to be judged
bench.py        the times of a loss's passes, the kernels' or tileloss.jax's, beside the machine's roofs
sweep.py        the bench of every combination of a config's lists, each in a process of its own
info.py         what was built, what this machine is
audit/          a list of cases against a list of implementations, each in a process of its own
implementations/  who can compute a case: torch, TRL, Liger, optax, ... and functions of the user's
report/         a page of result lines

config.py       the keys of a config that the compiled program leaves to this package
program.py      the compiled program as a child
results.py      result files
files.py        where an output may go, and whole files
printable.py    text from outside as messages show it; tables; "did you mean"
progress.py     how far the work is
trackers.py     result lines to wandb, Trackio, TensorBoard
case.py         a case, and helpers for implementations
case_file.py    its tensors in safetensors files
outputs.py      what an implementation returned, as the judge reads it
models.py       what a causal LM hands to its loss
model_case.py   a case of that
architectures.py  full-size models by name, for random weights
sweep_cases.py  the cases of a sweep's config
sweep_report.py  what a sweep says of them
jax_bench.py    the bench's inputs and steps in JAX
timing.py       time and peak memory of a call

The compiled program draws the inputs, holds the outputs against the oracle and measures the roofs; nothing is judged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloss.tools.case import Case, Refused

__all__ = ["Case", "Refused"]


def __getattr__(name: str) -> Any:
    """Case and Refused need numpy, which the command does not before it knows what it is to do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tileloss.tools import case

    return getattr(case, name)
