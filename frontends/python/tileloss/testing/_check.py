"""`check` and `judge`: any function, or outputs that are there, against the double-precision oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from tileloss._core.functions import FUNCTIONS
from tileloss.testing._drawn import GIVEN, Drawn, Report, draw, usual
from tileloss.testing._judge import JudgeError
from tileloss.testing.case import Case
from tileloss.testing.outputs import Missing, arrays, prepare, to_numpy

_SINGLE = ("float32", "fp32", "f32")
# What is drawn, and not where there are inputs.
_DRAWN = (
    "batch_size", "seq_len", "vocab_size", "hidden_size", "dtype", "ignore_prob", "mask_prob", "old_logp_noise_scale",
)  # fmt: skip
# Inputs of a caller's own, by their names in a config.
_SOURCES = {
    "head": "lm_head", "teacher_logits": "teacher",
    **{name: name for name in (
        "logits", "labels", "hidden", "hidden_r", "head_r", "bias", "allowed",
        "mask", "advantages", "old_logp", "ref_logp", "sampler_logp",
    )},
}  # fmt: skip
_NOT_OF_CASES = ("kernel", "head_layout", "strict", "output", "level", "loss")
# A float32 gradient of plain float32 arithmetic: lse - logit, and the backward's sum over the columns, are off by the same for a
# whole row, which the judge's own limit of the norm does not allow.
_PLAIN = {"ulp": 8, "normwise": 8}
_USAGE = 2  # JudgeError's code


def check(
    fn: Callable[..., Any],
    function: str,
    *,
    framework: str = "torch",
    dtype: Any = "float32",
    inputs: Mapping[str, Any] | None = None,
    backwards: int = 1,
    mutants: bool = False,
    device: str = "cpu",
    **settings: Any,
) -> Report:
    """Checks a loss and its gradient: draws a case, calls ``fn`` on it, and holds what it returns against an oracle in double
    precision. Nothing of it has a fixed tolerance: each row's own numbers say how far off float32, or the one rounding of a
    bfloat16 gradient, may be.

    ``fn`` gets logits [N,V], or hidden [N,H] and head [V,H], then a teacher's, then labels [N], or class probabilities in their
    place, and advantages [B], by position; by name what else the case has: ``allowed``, ``mask``, ``old_logp``, ``ref_logp``,
    ``sampler_logp``, ``bias``, ``class_weights``, ``token_weights``. Of a policy loss everything with a value a row is [B,T] or
    [B,T,V]. Rows that do not count hold 0 and have the label -100.

    It returns the loss, [] or [N], or of "logprobs" the log-probabilities [N]; or a dict or named tuple of them with row outputs
    by name ("logp", "lse", "entropy", ...).

    Args:
        fn: what is checked. It is called with tensors alone: the options that ``settings`` names are its own business.
        function: "cross_entropy", "logprobs", "policy_loss", "distillation", "sparse_distillation", "soft_cross_entropy";
            fused with the LM head "linear_cross_entropy", ...
        framework: "torch": tensors; gradients by autograd. "jax": arrays; gradients by jax.vjp, under jit. "numpy": arrays
            (bfloat16 is that of ml_dtypes), as for a C library; ``fn`` returns a dict that has the gradients too, "dlogits"
            [N,V], or "dhidden", "dhead" and "dbias", and gets upstream gradients, "loss_grad" or "logp_grad", where these are
            not 1. "case": a `Case`; ``fn`` returns a dict that has the gradients too.
        dtype: of logits, or hidden states and head: "float32", "bfloat16", "float16", or one of PyTorch, JAX or numpy.
        inputs: tensors of your own in place of drawn ones, by name: logits, or hidden, head and bias; labels, mask, advantages,
            old_logp, ref_logp, sampler_logp, teacher_logits, allowed; of any framework, rows as [N] or [B,T], labels of logprobs
            [N,K] or [B,T,K] too.
        backwards: how often the backward is called; the last one's gradients are judged. 0: the forward alone is.
        mutants: also plant wrong gradients in what has passed, each of which must fail.
        device: of PyTorch's tensors.
        settings: keys of a gradcheck config (docs/users/gradcheck.md); None leaves a default out. Options of the loss by name,
            ``preset``; ``batch_size``, ``seq_len``, ``vocab_size``, ``hidden_size``, ``seed``, ``ignore_prob`` (0.2),
            ``mask_prob``; ``labels_per_row`` of logprobs, whose labels are [N,K] then; ``allowed``, the sets of columns that
            rows' softmaxes run over ("half", "sparse", ...); ``class_weights``, ``token_weights`` and ``bias`` ("random");
            ``outputs``: row outputs that ``fn`` has to return; ``gradients`` among dhidden, dhead and dbias; ``rank`` of a
            low-rank part of the head, which ``fn`` gets as ``low_rank``, with gradients dhidden_r and dhead_r; ``upstream``:
            "random", of a loss a row "per_row", and "ones" with numpy; ``source``: {"distribution": "confident"};
            ``tolerances``: of float32 from logits {"ulp": 8, "normwise": 8}, what a plain log-softmax needs, else 1.

    Returns:
        The report: gates with value and limit, and all figures.

    Raises:
        AssertionError: a gate failed, or an output or gradient is not there. Names each gate with its value, its limit and,
            where it is known, row and column.
        ValueError, TypeError: an argument or setting is wrong, or ``fn`` returns something else.

    Example:
        >>> def test_my_loss():
        ...     def my_loss(logits, labels):
        ...         return torch.nn.functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        ...
        ...     tileloss.testing.check(my_loss, "cross_entropy", dtype="bfloat16", label_smoothing=0.1)
    """
    __tracebackhide__ = True
    if framework not in _FORMS:
        expected = ", ".join(_FORMS)
        raise ValueError(f"framework: expected one of {expected}, got {framework!r}")
    upstream = "ones" if framework == "numpy" else _upstream(function, settings)
    drawn = _draw("check", function, {"upstream": upstream, **settings}, dtype, inputs)
    case = replace(drawn.case.with_numbers(), backwards=backwards, device=device)
    if framework != "case":
        case = case.for_call()
    if backwards == 0:
        case = replace(case, gradients=())
    try:
        outputs = prepare(case, _FORMS[framework](fn, case))
        missing = [name for name in case.outputs if name not in outputs]
        if missing:
            raise Missing(missing[0])
    except Missing as error:
        raise AssertionError(f"{function}: {error}") from None
    return _held(drawn, outputs, mutants)


def judge(
    function: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    mutants: bool = False,
    **settings: Any,
) -> Report:
    """Judges outputs that are there, of inputs that are there, as `check` does; what is not there is not judged.

    Args:
        function: as of `check`.
        inputs: as of `check`.
        outputs: by name: loss [] or [N]; logp, lse, entropy, ... [N], of labels [N,K] logp [N,K]; dlogits [N,V], or dhidden
            [N,H], dhead [V,H] and dbias [V], of an upstream gradient of 1. Rows may be [B,T] where those of the inputs are. A
            gradient is judged by the type that it has.
        mutants, settings: as of `check`.

    Raises:
        AssertionError, ValueError, TypeError: as `check`.

    Example:
        >>> tileloss.testing.judge("cross_entropy", {"logits": x, "labels": y}, {"loss": loss, "dlogits": x.grad})
    """
    __tracebackhide__ = True
    drawn = _draw("judge", function, {"upstream": "ones", **settings}, None, inputs)
    for name, array in drawn.case.tensors.items():
        is_usual = name == "sequence_offsets" or (name.endswith("_grad") and (array == 1).all())
        if name not in inputs and not is_usual:
            raise ValueError(f"judge: inputs: expected {name}, got none")
    found = arrays(outputs)
    if drawn.case.labels_per_row == 1 and "logp" in found and "labels" in inputs:
        if found["logp"].shape == to_numpy("labels", inputs["labels"]).shape:
            found["logp"] = found["logp"].reshape(-1)  # of labels [N,1] too
    return _held(drawn, found, mutants)


# ------------------------------------------------------------------------------------------------------------ what is asked


def _upstream(function: str, settings: Mapping[str, Any]) -> str:
    has_rows = "none" in (settings.get("reduction"), settings.get("aggregation"))
    return "per_row" if has_rows or function.endswith("logprobs") else "random"


def _draw(
    name: str,
    function: str,
    settings: Mapping[str, Any],
    dtype: Any,
    inputs: Mapping[str, Any] | None,
) -> Drawn:
    """``dtype``: where there are no ``inputs``."""
    for key in (*_NOT_OF_CASES, *(["source"] if inputs is not None else [])):
        if key in settings:
            raise ValueError(f"{name}: {key}: expected none, got {settings[key]!r}")
    asked, given = usual(function), None
    if inputs is not None:
        if others := sorted(set(inputs) - set(_SOURCES)):
            raise ValueError(f"{name}: inputs: expected {', '.join(_SOURCES)}, got {others[0]}")
        given = {key: to_numpy(key, array) for key, array in inputs.items()}
        asked = {key: value for key, value in asked.items() if key not in _DRAWN}
        source = {_SOURCES[key]: key for key in given}
        asked["source"] = {"kind": "safetensors", "path": GIVEN, **source}
        operand = given.get("logits", given.get("hidden", np.zeros(0, np.float32)))
        if operand.ndim == 3:
            asked["batch_size"], asked["seq_len"], _ = operand.shape
        if function.endswith("logprobs") and _has_slots(given.get("labels"), operand.shape[:-1]):
            asked["labels_per_row"] = given["labels"].shape[-1]
            if asked["labels_per_row"] == 1:
                given["labels"] = given["labels"][..., 0]
        stored = operand.dtype.name
    else:
        asked["dtype"] = stored = _name_of(dtype)
    is_plain = stored in _SINGLE and not function.startswith("linear_")
    asked |= settings
    asked["tolerances"] = (_PLAIN if is_plain else {}) | (settings.get("tolerances") or {})
    asked = {key: value for key, value in asked.items() if value is not None}
    with _errors(ValueError):
        return draw(name, asked, given)


def _has_slots(labels: np.ndarray | None, rows: tuple[int, ...]) -> bool:
    """Of labels [N,K] or [B,T,K] beside ``rows``, which are (N,) or (B, T)."""
    return (
        labels is not None
        and labels.shape != rows
        and labels.shape[:-1] in (rows, (math.prod(rows),))
    )


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__.partition(".")[0] == "torch":
        return str(dtype).removeprefix("torch.")
    return np.dtype(dtype).name


def _held(drawn: Drawn, outputs: Mapping[str, np.ndarray], mutants: bool) -> Report:
    __tracebackhide__ = True
    with _errors(AssertionError):
        report = drawn.judged(outputs, mutants)
    if not report.passed:
        raise AssertionError(str(report))
    return report


@contextmanager
def _errors(refusal: type[Exception]) -> Iterator[None]:
    """The judge's as Python's: ``refusal`` where what it was given is wrong."""
    try:
        yield
    except JudgeError as error:
        other = MemoryError if error.out_of_memory else RuntimeError
        raise (refusal if error.code == _USAGE else other)(str(error)) from None


# ---------------------------------------------------------------------------------------------------------- how it is called


def _by_torch(fn: Callable[..., Any], case: Case) -> Any:
    arguments, named = case.arguments(case.torch)
    return case.torch_outputs(**_named(case, fn(*arguments, **named)))


def _by_jax(fn: Callable[..., Any], case: Case) -> Any:
    def compute(operands: Mapping[str, Any]) -> dict[str, Any]:
        def get(name: str) -> Any:
            return operands[name] if name in operands else case.jax(name)

        arguments, named = case.arguments(get)
        return _named(case, fn(*arguments, **named))

    return case.jax_outputs(compute)


def _by_numpy(fn: Callable[..., Any], case: Case) -> Any:
    arguments, named = case.arguments(case.tensors.__getitem__)
    upstream = {n: x for n, x in case.tensors.items() if n.endswith("_grad") and (x != 1).any()}
    return _named(case, fn(*arguments, **named, **upstream))


def _by_case(fn: Callable[..., Any], case: Case) -> Any:
    return fn(case)


_FORMS = {"torch": _by_torch, "jax": _by_jax, "numpy": _by_numpy, "case": _by_case}


def _named(case: Case, returned: Any) -> dict[str, Any]:
    """What a function returned, by name."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if hasattr(returned, "_asdict"):
        return {name: x for name, x in returned._asdict().items() if x is not None}
    if not hasattr(returned, "shape"):
        raise TypeError(
            f"expected an array, or a dict or named tuple of arrays, got {type(returned).__name__}"
        )
    return {"loss" if FUNCTIONS[case.function].is_loss else "logp": returned}
