"""What tileloss.jax makes of a case. A function that is added to tileloss.jax is known here by its name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import tileloss.jax
from tileloss._core.functions import FUNCTIONS, PUBLIC_OPTIONS
from tileloss._core.slots import DIFFERENTIABLE
from tileloss.check.case import Case

_RENAMED = {"class_weights": "weight"}  # of tileloss_args, where the public functions differ
_OPERANDS = ("logits", "hidden", "head", "bias")
_GRADIENTS = {"dlogits": "logits", "dhidden": "hidden", "dhead": "head", "dbias": "bias"}


def producer(implementation: str | None) -> str:
    """Who computes, in words of a report."""
    return (
        f"tileloss.jax {implementation or 'with its own choice'}, jax {jax.__version__}, "
        f"{jax.default_backend()}"
    )


def compute(case: Case, implementation: str | None) -> dict[str, np.ndarray]:
    """Every output of the case, by its name in tileloss_args; gradients in their tensors' dtypes.

    Row outputs come from a forward, the rest from one jitted step of value and gradient, whose operands are donated where the
    case is in place.

    Raises:
        TypeError, ValueError: as the functions of tileloss.jax.
    """
    call = Call(case, implementation)
    outputs: dict[str, Array] = {}
    if case.outputs:
        outputs |= jax.jit(call.row_outputs)(call.operands)
    donated = 0 if case.in_place else ()
    outputs |= jax.jit(call.value_and_grad, donate_argnums=donated)(call.operands)
    arrays = {name: np.asarray(array) for name, array in outputs.items()}
    if "dhead" in arrays and case.head_layout == "hv":
        arrays["dhead"] = arrays["dhead"].T
    return arrays


class Call:
    """A case's call of tileloss.jax, as functions of its operands: logits, or hidden states, head and bias."""

    def __init__(self, case: Case, implementation: str | None) -> None:
        """Raises ValueError where tileloss.jax lacks the function."""
        there = [name for name in FUNCTIONS if name in tileloss.jax.__all__]
        if case.function not in there:
            raise ValueError(
                f"loss: expected one that tileloss.jax has ({', '.join(there)}), got {case.function}"
            )
        self.case = case
        self.described = FUNCTIONS[case.function]
        self.tensors = {name: jnp.array(array) for name, array in case.tensors.items()}
        self.operands = {n: self.tensors.pop(n) for n in _OPERANDS if n in self.tensors}
        if case.head_layout == "hv":
            self.operands["head"] = self.operands["head"].T
        if "dbias" in case.gradients and "bias" not in self.operands:
            self.operands["bias"] = jnp.zeros(case.tensors["head"].shape[0], jnp.float32)
        self.labels = self.tensors.pop("labels")
        self.upstream = {n: self.tensors.pop(n) for n in list(self.tensors) if n.endswith("_grad")}
        self.keywords: dict[str, Any] = {"implementation": implementation}
        if self.described.is_linear:
            self.keywords["head_layout"] = case.head_layout.upper()

    def row_outputs(self, operands: dict[str, Array]) -> dict[str, Array]:
        """Those that the case asks for."""
        function = self.described.name.replace(self.described.loss, "logprobs")
        labels = self.labels
        if "mask" in self.tensors:  # logprobs has none
            usual = self.described.options["ignore_index"].usual
            ignored = self.case.options.get("ignore_index", usual)
            labels = jnp.where(self.tensors["mask"] != 0, labels, ignored)
        options = {n: v for n, v in self.case.options.items() if n in PUBLIC_OPTIONS[function]}
        rows = self._call(function, operands, labels, outputs=self.case.outputs, **options)
        return {name: getattr(rows, name) for name in self.case.outputs}

    def forward(self, operands: dict[str, Array]) -> Any:
        """The loss, or the differentiable row outputs that have an upstream gradient; and more to be judged, by name."""
        return self._loss(operands) if self.described.is_loss else self._rows(operands)

    def value_and_grad(self, operands: dict[str, Array]) -> dict[str, Array]:
        """What is to be judged of the forward, and the gradients."""
        wanted = [_GRADIENTS[name] for name in self.case.gradients]
        still = {name: array for name, array in operands.items() if name not in wanted}
        moving = {name: operands[name] for name in wanted}
        found, pull, outputs = jax.vjp(lambda x: self.forward(x | still), moving, has_aux=True)
        (gradients,) = pull(self._upstream_of(found))
        return outputs | {f"d{name}": gradient for name, gradient in gradients.items()}

    def _loss(self, operands: dict[str, Array]) -> tuple[Any, dict[str, Array]]:
        """The loss, and what the file is to have of it."""
        tensors = {_RENAMED.get(name, name): array for name, array in self.tensors.items()}
        labels, options = self.labels, self.case.options
        if not self.described.metrics:
            loss = self._call(self.case.function, operands, labels, **tensors, **options)
            return loss, {"loss": loss}
        advantages = tensors.pop("advantages")
        if "sequence_offsets" not in tensors:
            labels = labels.reshape(self.case.batch_size, self.case.seq_len)
        loss, metrics = self._call(
            self.case.function,
            operands,
            labels,
            advantages,
            return_metrics=True,
            **tensors,
            **options,
        )
        ordered = jnp.stack([metrics[name] for name in self.described.metrics])
        return loss, {"loss": loss, "metrics": ordered}

    def _rows(self, operands: dict[str, Array]) -> tuple[Any, dict[str, Array]]:
        """The row outputs that have an upstream gradient."""
        names = [name for name in DIFFERENTIABLE if f"{name}_grad" in self.upstream]
        return self._call(
            self.case.function, operands, self.labels, outputs=names, **self.case.options
        ), {}

    def _call(
        self, function: str, operands: dict[str, Array], labels: Array, *arguments: Any, **more: Any
    ) -> Any:
        first = [
            operands[name].reshape(*labels.shape, -1) if name != "head" else operands[name]
            for name in ("logits", "hidden", "head")
            if name in operands
        ]
        bias = {"bias": operands["bias"]} if "bias" in operands else {}
        called = getattr(tileloss.jax, function)
        return called(*first, labels, *arguments, **bias, **more, **self.keywords)

    def _upstream_of(self, found: Any) -> Any:
        """The upstream gradients of the case, one value standing for every row; 1 where it gives none."""
        if not self.described.is_loss:
            return type(found)(
                *(
                    None
                    if value is None
                    else jnp.broadcast_to(self.upstream[f"{name}_grad"], value.shape)
                    for name, value in found._asdict().items()
                )
            )
        given = self.upstream.get("loss_grad", jnp.ones((), jnp.float32))
        return jnp.broadcast_to(given.reshape(found.shape if given.size > 1 else ()), found.shape)
