"""A case: what an implementation is given to compute on, and helpers that keep an implementation short."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from jax import Array
    from torch import Tensor

_T = TypeVar("_T")
_A = TypeVar("_A", bound=Any)
_MATRICES = ("logits", "hidden", "head", "hidden_r", "head_r", "bias")
_ROWS = (
    "logits",
    "teacher_logits",
    "target_probs",
    "hidden",
    "hidden_r",
    "teacher_hidden",
    "teacher_logprobs",
    "token_weights",
    "old_logp",
    "ref_logp",
    "sampler_logp",
)
_ALWAYS = ("logits", "hidden", "head", "labels")
# What the package's functions take by position, in this order; class probabilities stand where labels stand.
_POSITIONAL = (
    "logits", "hidden", "head", "teacher_logits", "teacher_hidden", "teacher_head", "teacher_ids", "teacher_logprobs",
    "target_probs", "labels", "advantages",
)  # fmt: skip


class Refused(Exception):
    """Raised by an implementation for a case that it does not offer: no verdict on it."""


@dataclass(frozen=True)
class Case:
    """What a loss is to be computed on. The judge draws it (``tileloss.testing.check``, ``tileloss audit``, ``tileloss gradcheck
    --impl``).

    An implementation is a function of a case that returns its outputs, by their names in tileloss_args: numpy, torch or JAX
    arrays, loss [] or [N], row outputs [N], of labels [N,K] logp [N,K], dlogits [N,V], or dhidden [N,H], dhead [V,H] and
    dbias [V].
    """

    tensors: dict[str, np.ndarray]  # by their names in tileloss_args
    function: str  # "cross_entropy", "linear_cross_entropy", ...
    options: dict[str, Any]  # those that differ from the defaults, a preset's too
    batch_size: int
    seq_len: int
    outputs: list[str]  # row outputs that are asked for
    mutants: bool
    in_place: bool
    gradients: tuple[str, ...] = ("dlogits",)  # or of dhidden, dhead, dbias, dhidden_r, dhead_r
    head_layout: str = "vh"  # as the function is to be given the head, which is [V, H] here
    backwards: int = 1  # how often the backward is called; the last one's gradients are judged
    # What an implementation has of its own that is to change no result: "chunk_size" in its own unit, "shards" of the vocabulary.
    knobs: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"  # PyTorch's tensors of the case are there
    # By `torch`. A case that is made by dataclasses.replace has handed out nothing.
    _handed_out: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def ignore_index(self) -> int:
        return int(self.options.get("ignore_index", -100))

    @property
    def in_use(self) -> np.ndarray:
        """[N] bool: the rows that are neither ignored nor masked."""
        used = (
            (self.tensors["labels"] != self.ignore_index).reshape(-1, self.labels_per_row).any(-1)
        )
        return used & (self.tensors["mask"] != 0) if "mask" in self.tensors else used

    @property
    def labels_per_row(self) -> int:
        """K of labels [N,K], of which one that is ignore_index is an empty slot; 1 of labels [N]."""
        return math.prod(self.tensors["labels"].shape[1:]) if "labels" in self.tensors else 1

    @property
    def valid_vocab(self) -> int:
        """The columns that are in the softmax."""
        if "valid_vocab" in self.options:
            return int(self.options["valid_vocab"])
        if "logits" in self.tensors:
            return self.tensors["logits"].shape[1]
        return self.tensors["head"].shape[0]

    @property
    def allowed(self) -> np.ndarray:
        """[N, valid_vocab] bool: the columns that each row's softmax runs over. All of them where the case has no sets."""
        shape = (len(self.tensors["labels"]), self.valid_vocab)
        if "allowed" not in self.tensors:
            return np.ones(shape, bool)
        words = np.ascontiguousarray(self.tensors["allowed"]).astype("<i4")
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return np.broadcast_to(bits[:, : shape[1]].astype(bool), shape)

    @property
    def differentiated(self) -> list[str]:
        """The outputs that have an upstream gradient in the case."""
        return [name.removesuffix("_grad") for name in self.tensors if name.endswith("_grad")]

    def asked(self, rows: Mapping[str, _T]) -> dict[str, _T]:
        """Of row outputs by name those that the case asks for."""
        return {name: row for name, row in rows.items() if name in self.outputs}

    def refuse_unless(
        self,
        functions: Collection[str],
        options: Collection[str] = (),
        tensors: Collection[str] = (),
        differentiable: Collection[str] = ("loss",),
        several_labels: bool = False,
    ) -> None:
        """Raises Refused for another function, option, tensor, or output with an upstream gradient, and unless ``several_labels``
        for labels [N,K]. Options with their default value are not in the case."""
        if self.function not in functions:
            raise Refused(f"{self.function}: it has {', '.join(functions)}")
        known = {*_ALWAYS, *tensors, *(f"{name}_grad" for name in differentiable)}
        others = [name for name in self.options if name not in options]
        others += [name for name in self.tensors if name not in known]
        if others:
            raise Refused(f"{', '.join(others)}: not offered")
        if self.labels_per_row > 1 and not several_labels:
            raise Refused("several labels a row: not offered")

    def with_numbers(self) -> Case:
        """The same for implementations that read everything: what tileloss never reads and is NaN here becomes 0, logits
        outside a row's set too; the labels of masked rows ignore_index, an absent bias whose gradient is asked for 0. Offsets of
        sequences of one length are left out.
        """
        used, valid = self.in_use, self.valid_vocab
        tensors = {name: np.array(array) for name, array in self.tensors.items()}
        of_rows = set(_ROWS) & set(tensors)
        if self.options.get("advantage_level") == "token":
            of_rows.add("advantages")
        for name in of_rows:
            tensors[name][~used] = 0
        if "teacher_ids" in tensors:
            tensors["teacher_ids"][~used] = -1
        if "allowed" in tensors and not self._is_shared("allowed"):
            tensors["allowed"][~used] = -1
        if "logits" in tensors:
            tensors["logits"][:, valid:] = 0
            for name in {"teacher_logits", "target_probs"} & set(tensors):
                tensors[name][:, valid:] = 0
            for name in {"logits", "teacher_logits"} & set(tensors):
                tensors[name][:, :valid][~self.allowed] = 0
        else:
            for name in {"head", "head_r", "bias", "teacher_head", "teacher_bias"} & set(tensors):
                tensors[name][valid:] = 0
            if "bias" not in tensors and "dbias" in self.gradients:
                tensors["bias"] = np.zeros(len(tensors["head"]), np.float32)
        tensors["labels"] = np.where(used, tensors["labels"].T, self.ignore_index).T
        regular = np.arange(0, len(used) + 1, max(self.seq_len, 1))
        if np.array_equal(tensors.get("sequence_offsets", ()), regular):
            del tensors["sequence_offsets"]  # batch_size and seq_len say the same
        return replace(self, tensors=tensors)

    def for_call(self) -> Case:
        """With a bias where its gradient is asked for. Class probabilities go without labels: the mask has the rows that these
        leave out."""
        tensors = self.tensors
        if "target_probs" in tensors and not self.in_use.all():
            tensors = tensors | {"mask": self.in_use.astype(np.float32)}
        if "dbias" in self.gradients and "bias" not in tensors:
            tensors = tensors | {"bias": np.zeros(len(tensors["head"]), np.float32)}
        return replace(self, tensors=tensors)

    def arguments(self, get: Callable[[str], _A]) -> tuple[list[_A], dict[str, Any]]:
        """Of a function that is called as those of `tileloss.torch` are: what goes by position, and the rest by name. ``get``: a
        tensor of the case as an array. Values of rows are [N], of a policy loss [B,T], where no offsets name the sequences.
        """
        left_out = ["labels"] if "target_probs" in self.tensors else []
        names = [n for n in self.tensors if n not in left_out and not n.endswith("_grad")]
        found = {name: self._in_batch(name, get(name)) for name in names}
        if "allowed" in found and self._is_shared("allowed"):
            found["allowed"] = get("allowed")[0]
        if "hidden_r" in found:
            found["low_rank"] = (found.pop("hidden_r"), found.pop("head_r"))
        first = [found.pop(name) for name in _POSITIONAL if name in found]
        return first, found

    def _in_batch(self, name: str, array: Any) -> Any:
        if "advantages" not in self.tensors or "sequence_offsets" in self.tensors:
            return array
        of_rows = {*_ROWS, "labels", "mask", "allowed"}
        if self.options.get("advantage_level") == "token":
            of_rows.add("advantages")
        shape = (self.batch_size, self.seq_len, *array.shape[1:])
        is_of_row = name in of_rows and not self._is_shared(name)
        return array.reshape(shape) if is_of_row else array

    def _is_shared(self, name: str) -> bool:
        """One row of it is all rows'."""
        return len(self.tensors[name]) < len(self.tensors["labels"])

    # ------------------------------------------------------------------------------------------------------------- PyTorch

    def torch(self, name: str) -> Tensor:
        """A copy of the tensor for PyTorch; the same one when asked again. It requires a gradient where the case asks for it."""
        if name not in self._handed_out:
            tensor = self._to_torch(self.tensors[name])
            needs_grad = f"d{name}" in self.gradients
            self._handed_out[name] = tensor.requires_grad_() if needs_grad else tensor
        return self._handed_out[name]

    def torch_in_use(self) -> Tensor:
        """`in_use` for PyTorch."""
        return self._to_torch(self.in_use)

    def torch_allowed(self) -> Tensor:
        """`allowed` for PyTorch."""
        return self._to_torch(self.allowed)

    def _to_torch(self, array: np.ndarray) -> Tensor:
        """A copy, on the case's device."""
        import torch

        copied = np.array(array)
        if copied.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(copied)
        return tensor.to(self.device)

    def torch_outputs(self, **outputs: Tensor) -> dict[str, Tensor | None]:
        """The outputs by name, and the gradients that the case asks for, by autograd from those that have an upstream gradient.
        A gradient that autograd does not find is None, which fails."""
        import torch

        results = {
            n: x for n, x in outputs.items() if self._is_differentiated(n) and x.requires_grad
        }
        upstream = []
        for name, x in results.items():
            given = self._to_torch(self.upstream(name)).to(x.dtype).reshape(-1)
            upstream.append(given.expand(x.numel()).reshape(x.shape))
        leaves = {n: x for n, x in self._handed_out.items() if x.requires_grad}
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        for turn in range(self.backwards if results else 0):
            gradients = torch.autograd.grad(
                list(results.values()),
                list(leaves.values()),
                upstream,
                retain_graph=turn + 1 < self.backwards,
                allow_unused=True,
            )
        named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
        return {name: array.detach() for name, array in outputs.items()} | named

    # ----------------------------------------------------------------------------------------------------------------- JAX

    def jax(self, name: str) -> Array:
        """A copy of the tensor for JAX."""
        import jax.numpy as jnp

        return jnp.array(self.tensors[name])

    def jax_operands(self) -> dict[str, Array]:
        return {name: self.jax(name) for name in _MATRICES if name in self.tensors}

    def jax_step(
        self, compute: Callable[[dict[str, Array]], Mapping[str, Array]]
    ) -> Callable[[dict[str, Array]], dict[str, Array]]:
        """A function of the operands (logits, or hidden, head and bias) by name. It returns the outputs that `compute` gives of
        them, and the gradients that the case asks for, by jax.vjp from the outputs that have an upstream gradient."""
        import jax
        import jax.numpy as jnp

        def step(operands: dict[str, Array]) -> dict[str, Array]:
            moving = {name: x for name, x in operands.items() if f"d{name}" in self.gradients}

            def run(moving: dict[str, Array]) -> tuple[Any, Any]:
                found = compute(operands | moving)
                return {n: x for n, x in found.items() if self._is_differentiated(n)}, found

            results, pull, found = jax.vjp(run, moving, has_aux=True)
            upstream = {
                name: jnp.broadcast_to(
                    jnp.reshape(self.upstream(name), -1).astype(x.dtype), x.size
                ).reshape(x.shape)
                for name, x in results.items()
            }
            gradients: dict[str, Array] = {}
            for _ in range(self.backwards):
                (gradients,) = pull(upstream)
            return {**found, **{f"d{name}": x for name, x in gradients.items()}}

        return step

    def jax_outputs(
        self, compute: Callable[[dict[str, Array]], Mapping[str, Array]], donates: bool = False
    ) -> dict[str, Array]:
        """Of `jax_step`, jitted. ``donates``: the operands' memory may be written over."""
        import jax

        step = jax.jit(self.jax_step(compute), donate_argnums=0 if donates else ())
        return dict(step(self.jax_operands()))

    # ------------------------------------------------------------------------------------------------------------ upstream

    def _is_differentiated(self, name: str) -> bool:
        return name == "loss" or f"{name}_grad" in self.tensors

    def upstream(self, name: str) -> np.ndarray:
        """The gradient of an output, float32 [N] or one value; 1 for a loss where the case has none."""
        return self.tensors.get(f"{name}_grad", np.ones(1, np.float32))
