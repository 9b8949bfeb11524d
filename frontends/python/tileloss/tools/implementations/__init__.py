"""Who can compute a case, by name: functions of a case that return its outputs, small adapters to each package's public API.

torch_losses.py     torch, torch-float32, torch-compile, torch-linear
torch_policy.py     the GRPO family in plain torch, from log-probabilities
trl.py, liger.py, cce.py
loss_types.py       the names that TRL and Liger have for policy losses
signatures.py       arguments that not every release has
jax_losses.py       jax, optax, tokamax
contract.py         what the bits of results depend on
own.py              tileloss-torch, tileloss-jax
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import tileloss
from tileloss.testing.case import Case
from tileloss.testing.outputs import describe
from tileloss.tools.implementations.contract import Contract, declared, tileloss_contract
from tileloss.tools.printable import did_you_mean

NATIVE = "tileloss"  # the C++ kernels, which the judge runs by itself
Compute = Callable[[Case], Any]


class NotInstalled(RuntimeError):
    """A package that an implementation needs is not there."""


class Known(NamedTuple):
    """An implementation of the table: `module` of this folder has the function `compute`."""

    module: str
    packages: tuple[str, ...]  # distributions, that of the implementation first
    summary: str
    compute: str = "compute"
    reads_ignored: bool = (
        True  # rows and columns that tileloss never reads hold 0 for it, NaN for the others
    )
    on_gpus: str = ""  # what of it runs on a GPU alone


class Implementation(NamedTuple):
    name: str
    package: str  # "torch 2.15.0"
    compute: Compute
    reads_ignored: bool = True
    contract: Contract | None = None  # what its bits depend on; None: unknown

    def __call__(self, case: Case) -> Any:
        return self.compute(case.with_numbers() if self.reads_ignored else case)


def _torch(compute: str, summary: str) -> Known:
    return Known("torch_losses", ("torch",), summary, compute)


def _jax(compute: str, summary: str, *packages: str) -> Known:
    return Known("jax_losses", (*packages, "jax"), summary, compute)


KNOWN = {
    "torch": _torch(
        "eager", "torch.nn.functional in the logits' dtype; policy losses in plain torch"
    ),
    "torch-float32": _torch("eager_float32", "the same on logits widened to float32"),
    "torch-compile": _torch("compiled", "the same as torch, under torch.compile"),
    "torch-linear": _torch("linear", "torch.nn.functional.linear_cross_entropy, in chunks"),
    "trl": Known(
        "trl", ("trl", "torch"), "the log-probabilities and the loss of TRL's GRPO trainer"
    ),
    "liger": Known(
        "liger",
        ("liger-kernel", "torch", "triton"),
        "Liger's cross-entropy (on a CPU in Triton's interpreter), chunked policy losses",
        on_gpus="Liger's Triton kernels as a GPU runs them",
    ),
    "cce": Known(
        "cce",
        ("cut-cross-entropy", "torch"),
        "Cut Cross-Entropy, without a GPU under torch.compile",
        on_gpus="Cut Cross-Entropy's Triton kernels",
    ),
    "jax": _jax("plain", "jax.nn.log_softmax in float32"),
    "optax": _jax("optax", "optax's cross-entropy, in the logits' dtype", "optax"),
    "tokamax": _jax("tokamax", "tokamax.linear_softmax_cross_entropy_loss", "tokamax"),
    "tileloss-torch": Known("own", ("torch",), "tileloss.torch", "through_torch", False),
    "tileloss-jax": Known("own", ("jax",), "tileloss.jax", "through_jax", False),
}
# Of Case.knobs those that an implementation has, with values that should all give the same. Chunks: with the LM head.
KNOBS: dict[str, dict[str, tuple[int, ...]]] = {
    "torch-linear": {"chunk_size": (8, 24, 64)},  # rows
    "liger": {"chunk_size": (1, 4, 16)},  # chunk_mem_const
    "tileloss-torch": {"chunk_size": (1 << 20, 1 << 26)},  # workspace_bytes
    "tileloss-jax": {"shards": (1, 2, 4, 8)},
}
NAMES = (NATIVE, *KNOWN)


def needs_gpu(name: str, device: str) -> str:
    """What of an implementation has not run on this device: nothing on a GPU."""
    known = KNOWN.get(name)
    return known.on_gpus if known and device == "cpu" else ""


def hide_gpus() -> None:
    """For cases whose tensors are on the CPU, before anything looks for a GPU: many packages run on one that they see."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def check_name(name: str) -> None:
    """Raises ValueError for a name that is neither known nor of the form module:function or FILE.py:function, and where there is
    no such module or file, as far as that is known without importing it."""
    if name in NAMES:
        return
    place, colon, _ = name.rpartition(":")
    if not colon:
        raise ValueError(
            f"--impl: expected one of {', '.join(NAMES)}, or module:function, got {name}{did_you_mean(name, NAMES)}"
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"--impl: expected a Python file, got {place}")
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    package = place.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise ValueError(f"--impl {name}: there is no module {place}")


def load(name: str, device: str = "cpu") -> Implementation:
    """Imports it. ``device``: where its tensors will be.

    Raises:
        ValueError: no such name, module or function, or a module of the user's that cannot be imported.
        NotInstalled: naming the package.
    """
    check_name(name)
    if name not in KNOWN:
        function = _load_function(name)
        contract = declared(name, getattr(function, "contract", None))
        return Implementation(name, name, function, contract=contract)
    known = KNOWN[name]
    for package in known.packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise NotInstalled(f"{package} is not installed: pip install {package}")
    try:
        adapter = importlib.import_module(f"{__name__}.{known.module}")
    except Exception as error:  # of whatever kind: it is the package's import
        package = f"{known.packages[0]} {metadata.version(known.packages[0])}"
        raise NotInstalled(f"{package} cannot be imported here: {error}") from error
    compute: Compute = getattr(adapter, known.compute)
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in known.packages)
    if known.reads_ignored:
        return Implementation(name, versions, compute)
    # What lies between the library's two sweeps is JAX's own arithmetic.
    row_stage = f"row stage of {versions}" if "jax" in known.packages else ""
    contract = tileloss_contract(device, row_stage)
    return Implementation(
        name, f"tileloss {tileloss.__version__}, {versions}", compute, False, contract
    )


def _load_function(name: str) -> Compute:
    place, _, function = name.rpartition(":")
    try:
        is_there = place.endswith(".py") or importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise ValueError(f"--impl {name}: there is no module {place}")
    try:
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (Exception, SystemExit) as error:
        raise ValueError(f"--impl {name}: its import fails: {describe(error)}") from error
    compute = getattr(module, function, None)
    if not callable(compute):
        raise ValueError(f"--impl {name}: {place} has no function {function}")
    return compute


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
