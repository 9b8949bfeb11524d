"""One call of the library on tensors: what every operator's kernel comes down to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tileloss import _library
from tileloss._library import FUNCTIONS, Args, Function
from tileloss.torch import _options, _tensors

# Rows' inputs that a function takes besides its labels, in the order of its operators' arguments.
EXTRA_INPUTS = {
    "cross_entropy": ("class_weights", "token_weights"),
    "logprobs": (),
    "policy_loss": (
        "mask",
        "old_logp",
        "ref_logp",
        "sampler_logp",
        "advantages",
        "sequence_offsets",
    ),
}
ROW_OUTPUTS = {
    "logp": torch.float32,
    "lse": torch.float32,
    "entropy": torch.float32,
    "argmax": torch.int64,
    "correct": torch.uint8,
    "log_sum_sq_probs": torch.float32,
    "mean_logit": torch.float32,
}
# The ABI's types of a mask; of others only what is 0 is kept.
_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
_ARGS_BYTES = ctypes.sizeof(Args)
# The ABI's names of what the public functions name as torch does.
ARGUMENT_NAMES = {
    "logits": "input",
    "hidden": "input",
    "head": "linear_weight",
    "bias": "linear_bias",
    "labels": "target",
    "class_weights": "weight",
}


class Call:
    """The arguments of one call under construction; keeps alive what they point to."""

    def __init__(
        self, name: str, options: str, values: Sequence[float], scalars: Tensor | None
    ) -> None:
        self.function: Function = FUNCTIONS[name]
        self.args = Args(_ARGS_BYTES)
        self.alive: list[Tensor | None] = [scalars]
        self.options = _options.to_struct(self.function, options, values, scalars)
        self.names, self.values = options, values

    def logits(self, logits: Tensor, dlogits: Tensor | None = None) -> None:
        self.alive.append(_tensors.set_logits(self.args, logits, dlogits))

    def head(self, hidden: Tensor, head: Tensor, bias: Tensor | None, compute_dtype: int) -> None:
        rows = _tensors.without_overlap(hidden.reshape(-1, hidden.shape[-1]))
        head = head.resolve_neg()
        self.alive += (rows, head)
        _tensors.set_strided_matrix(self.args, "hidden", rows)
        _tensors.set_strided_matrix(self.args, "head", head)
        self.vector("bias", bias)
        self.args.compute_dtype = compute_dtype

    def vector(self, slot: str, tensor: Tensor | None, dtype: torch.dtype | None = None) -> None:
        if tensor is not None:
            self.alive.append(_tensors.set_vector(self.args, slot, tensor, dtype))

    def inputs(self, labels: Tensor, extra: Sequence[Tensor | None]) -> None:
        self.vector("labels", labels)
        names = EXTRA_INPUTS[self.function.name.removeprefix("linear_")]
        for name, tensor in zip(names, extra, strict=True):
            if tensor is None:
                continue
            if name == "mask":
                self.vector(name, tensor if tensor.dtype in _MASKS else tensor.ne(0))
            elif name == "sequence_offsets":
                self.vector(name, tensor, None if tensor.dtype == torch.int32 else torch.int64)
            else:
                # Class weights are looked up by label: the ABI wants them without gaps.
                whole = tensor.contiguous() if name == "class_weights" else tensor
                self.vector(name, whole, torch.float32)
        if "sequence_offsets" in names and extra[-1] is None:
            length = labels.shape[-1] if labels.dim() > 1 else labels.numel()
            self.args.sequence_length = length
            if length == 0:
                self._sequences_without_tokens(prod(labels.shape[:-1]))

    def _sequences_without_tokens(self, count: int) -> None:
        """Only offsets can say how many there are. With offsets the library knows no T to stand for max_length; as there is
        nothing to divide, any will do."""
        offsets = torch.zeros(count + 1, dtype=torch.int64, device=_tensors.CPU)
        self.vector("sequence_offsets", offsets)
        if not _options.is_given(self.names, "max_length"):
            self.options = type(self.options).from_buffer_copy(self.options)
            self.function.set_value(self.options, "max_length", 1)

    def new_output(
        self, slot: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        output = torch.empty(shape, dtype=dtype, device=_tensors.CPU)
        self.vector(slot, output)
        return output

    def run(self, call_pass: int, workspace_bytes: int = 0) -> None:
        threads = torch.get_num_threads()
        _library.call(
            self.function,
            call_pass,
            self.args,
            self.options,
            threads=threads,
            workspace_bytes=workspace_bytes,
            renamed=ARGUMENT_NAMES,
        )


def is_per_row(name: str, options: str, values: Sequence[float]) -> bool:
    """Whether the loss is one number a row: reduction or aggregation "none"."""
    function = FUNCTIONS[name]
    choice = "reduction" if "reduction" in function.options else "aggregation"
    return _options.choice_of(function, options, values, choice) == "none"


def state_arrays(options: str) -> int:
    """How many arrays of the row state the backward of a loss reads: max, sum, target, and entropy_sum where it is used."""
    given = options.partition(":")[2]
    reads_entropy = ("entropy_coef", "entropy_quantile", "entropy_threshold")
    return 4 if any(name in given for name in reads_entropy) else 3
