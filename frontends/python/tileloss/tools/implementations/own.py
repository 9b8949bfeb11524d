"""TileLoss through its front ends, as users call it: what a case's tensors and options are called there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tileloss._core.functions import FLAG, FUNCTIONS
from tileloss.testing.case import Case

if TYPE_CHECKING:
    from jax import Array

_HEADS = ("head", "teacher_head")
_OF_LOGITS = ("bias", "low_rank", "allowed")


class FrontEnd(NamedTuple):
    """`package`: torch or jax.numpy, whose arrays lie where ``placed`` says."""

    module: Any
    package: Any
    renamed: dict[str, str]
    placed: dict[str, Any]

    def function(self, name: str) -> Any:
        """Raises ValueError where there is none."""
        if name not in self.module.__all__:
            there = [each for each in FUNCTIONS if each in self.module.__all__]
            raise ValueError(
                f"loss: expected one that {self.module.__name__} has ({', '.join(there)}), got {name}"
            )
        return getattr(self.module, name)


class Call:
    """A case's call of a front end. ``get``: a tensor of the case by its name, as an array of that; ``more``: arguments that no
    case has."""

    def __init__(
        self, case: Case, front_end: FrontEnd, get: Callable[[str], Any], **more: Any
    ) -> None:
        self.case, self.front_end, self.get, self.more = case, front_end, get, more
        self.described = FUNCTIONS[case.function]
        self.is_linear = self.described.is_linear
        # Row outputs that the function itself returns: those of distillation, and where it is no loss those with a gradient.
        self.own_rows = [] if self.described.is_loss else case.differentiated
        if any(name.startswith("teacher_") for name in case.tensors):
            fields = front_end.module.DistillationRows._fields
            self.own_rows = [name for name in case.outputs if name in fields]

    def outputs(self) -> dict[str, Any]:
        """By name what the case's function returns: loss, metrics, its own row outputs."""
        function = self.front_end.function(self.case.function.replace("soft_", ""))
        arguments, named = self.case.arguments(self.get)
        keywords = self._renamed(named) | self._options() | self.more
        if not self.described.is_loss:
            return self._rows(function, arguments, self.own_rows, keywords)
        # Made in the forward, a gradient of 16 bits would be rounded once more where it is scaled.
        if not self.is_linear and (self.case.upstream("loss") != 1).any():
            keywords["grad_in_forward"] = False
        if self.own_rows:
            loss, rows = function(*arguments, outputs=self.own_rows, **keywords)
            return {"loss": loss} | {name: getattr(rows, name) for name in self.own_rows}
        if not self.described.metrics:
            return {"loss": function(*arguments, **keywords)}
        loss, metrics = function(*arguments, return_metrics=True, **keywords)
        # JAX leaves out what does not apply.
        none = self.front_end.package.asarray(math.nan)
        ordered = [metrics.get(name, none) for name in self.described.metrics]
        return {"loss": loss, "metrics": self.front_end.package.stack(ordered)}

    def rows(self) -> dict[str, Any]:
        """The other row outputs that the case asks for, by logprobs, which has no mask."""
        name = "linear_logprobs" if self.is_linear else "logprobs"
        options = {n: x for n, x in self._options().items() if n in FUNCTIONS[name].options}
        package, case = self.front_end.package, self.case
        used = package.asarray(case.in_use, **self.front_end.placed)
        labels = self.get("labels")
        if case.labels_per_row == 1:  # with several no function takes a mask
            labels = package.where(used, labels, case.ignore_index)
        operands = [self.get(n) for n in ("logits", "hidden", "head") if n in case.tensors]
        _, named = case.arguments(self.get)
        given = {name: array for name, array in named.items() if name in _OF_LOGITS}
        keywords = self._renamed(given) | options | self.more
        asked = [n for n in case.outputs if n not in self.own_rows]
        return self._rows(self.front_end.function(name), [*operands, labels], asked, keywords)

    def _rows(
        self, function: Any, arguments: list[Any], asked: list[str], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        found = function(*arguments, outputs=asked, **keywords) if asked else None
        return {name: getattr(found, name) for name in asked}

    def _renamed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        renamed = self.front_end.renamed
        return {renamed.get(name, name): array for name, array in arguments.items()}

    def _options(self) -> dict[str, Any]:
        options = dict(self.case.options)
        for name, value in options.items():
            if self.described.options[name].choices == FLAG:
                options[name] = value in (True, "true")
        if "compute_dtype" in options:
            options["compute_dtype"] = getattr(self.front_end.package, options["compute_dtype"])
        return options


def through_torch(case: Case) -> dict[str, Any]:
    import torch

    import tileloss.torch
    from tileloss.torch._call import ARGUMENT_NAMES

    case = case.for_call()
    front_end = FrontEnd(tileloss.torch, torch, ARGUMENT_NAMES, {"device": case.device})
    call = Call(case, front_end, case.torch)
    if call.is_linear:
        call.more["workspace_bytes"] = case.knobs.get("chunk_size")
    return call.rows() | case.torch_outputs(**call.outputs())


def through_jax(case: Case, implementation: str | None = None) -> dict[str, Any]:
    """Row outputs come from a jitted forward, the rest from one jitted step of value and gradient, whose operands are donated
    where the case is in place.

    Raises:
        TypeError, ValueError: as the functions of tileloss.jax.
    """
    import jax

    if "shards" in case.knobs:
        return _over_shards(case, case.knobs["shards"])
    case = case.for_call()
    is_transposed = case.head_layout == "hv"
    if is_transposed:
        heads = {name: case.tensors[name].T for name in _HEADS if name in case.tensors}
        case = replace(case, tensors=case.tensors | heads)
    rows = jax.jit(lambda operands: jax_call(case, operands, implementation).rows())
    found = dict(rows(case.jax_operands())) if case.outputs else {}
    found |= case.jax_outputs(
        lambda operands: jax_call(case, operands, implementation).outputs(), donates=case.in_place
    )
    if is_transposed and "dhead" in found:
        found["dhead"] = found["dhead"].T
    return found


def jax_call(case: Case, operands: Mapping[str, Array], implementation: str | None) -> Call:
    """Of tileloss.jax, with these operands in place of the case's, whose heads lie as its head_layout says."""
    import jax.numpy as jnp

    import tileloss.jax
    from tileloss.jax._arguments import SHOWN

    def get(name: str) -> Array:
        return operands[name] if name in operands else case.jax(name)

    call = Call(case, FrontEnd(tileloss.jax, jnp, SHOWN, {}), get)
    call.more["implementation"] = implementation
    if call.is_linear:
        call.more["head_layout"] = case.head_layout.upper()
    return call


def jax_producer(implementation: str | None) -> str:
    """Who computes, in words of a report."""
    import jax

    how = implementation or "with its own choice"
    return f"tileloss.jax {how}, jax {jax.__version__}, {jax.default_backend()}"


def _over_shards(case: Case, count: int) -> dict[str, Any]:
    """logp of a vocabulary that is cut over the first devices."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    case.refuse_unless(["logprobs", "linear_logprobs"], differentiable=["logp"])
    P: Any = PartitionSpec
    mesh = Mesh(np.array(jax.devices()[:count]), ("tp",))

    def shard_logp(operands: dict[str, Any]) -> dict[str, Any]:
        call = jax_call(case, operands, None)
        call.more["vocab_axis"] = "tp"
        return call.outputs()

    def compute(operands: dict[str, Any]) -> dict[str, Any]:
        cut = {"logits": P(None, "tp"), "hidden": P(), "head": P("tp")}
        specs = ({name: cut[name] for name in operands},)
        return dict(jax.shard_map(shard_logp, mesh=mesh, in_specs=specs, out_specs=P())(operands))

    return case.jax_outputs(compute)
