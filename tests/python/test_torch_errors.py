"""Bad input: the exception's type and message, which name the Python argument, what was expected and what was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss import torch as tl
from tileloss._core import functions
from torch_problems import FUNCTIONS, LINEAR_FUNCTIONS, LOGIT_FUNCTIONS, problem
from wrapped_tensors import Opaque, quantized

V, H = 67, 16
ROW_OUTPUTS, PAIR_ROWS = (", ".join(of._fields) for of in (tl.RowOutputs, tl.DistillationRows))
KINDS = ", ".join(functions.FUNCTIONS["distillation"].options["divergence"].choices)
IDS = torch.tensor([1, 2]).repeat(3, 5, 1)
TEACHERS: dict[str, dict[str, Any]] = {
    "distillation": {"teacher": torch.zeros(3, 5, V)},
    "linear_distillation": {"teacher_input": torch.zeros(3, 5, H), "teacher_weight": torch.zeros(V, H)},
    "sparse_distillation": {"teacher_ids": IDS, "teacher_logprobs": torch.zeros(3, 5, 2)},
}  # fmt: skip


def call(name: str, **changed: Any) -> Any:
    """The function on [3, 5] rows, with some arguments changed."""
    p = problem()
    given: dict[str, Any] = {"target": p.labels}
    linear = {"input": p.hidden, "linear_weight": p.weight}
    given |= linear if "linear" in name else {"input": p.logits}
    if "policy" in name:
        given["advantages"] = p.advantages
    given |= TEACHERS.get(name, {})
    return getattr(tl, name)(**{**given, **changed})


def refused(name: str, error: type[Exception], message: str, **changed: Any) -> None:
    with pytest.raises(error) as raised:
        call(name, **changed)
    assert type(raised.value) is error
    assert str(raised.value).startswith(message), str(raised.value)


@pytest.mark.parametrize("value", [V, -1, 2**32, -(2**62)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_out_of_range_name_row_and_value(name: str, value: int) -> None:
    labels = torch.zeros(3, 5, dtype=torch.int64)
    labels[1, 2] = value
    message = f"target[7]: expected 0 <= label < {V} or ignore_index -100, got {value}"
    refused(name, IndexError, message, target=labels)


@pytest.mark.parametrize("inplace_backward", [False, True])
def test_labels_out_of_range_leave_the_logits_alone(inplace_backward: bool) -> None:
    x = torch.randn(4, V)
    logits = x.clone().requires_grad_()
    labels = torch.tensor([1, 2, 3, V])
    mode = {"grad_in_forward": True, "inplace_backward": inplace_backward}
    with pytest.raises(IndexError):
        tl.cross_entropy(logits * 1 if not inplace_backward else logits, labels, **mode)
    assert torch.equal(logits.detach(), x)


FLOAT_LABELS = f"target: expected labels of an integer type, or class probabilities of the logits' shape [3, 5, {V}], got torch."
TYPES = "expected float32, bfloat16 or float16, got torch."
# Of the first tensor, in the linear functions as wide as it is, and of labels.
TENSORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": torch.ones(3, 5, V).double()}, TypeError, f"input: {TYPES}float64"),
    ({"input": torch.ones(3, 5, V).long()}, TypeError, f"input: {TYPES}int64"),
    ({"input": [[1.0]]}, TypeError, "input: expected a Tensor, got list"),
    ({"input": torch.tensor(1.0)}, ValueError, "input: expected at least one dimension, got a scalar"),
    ({"input": torch.ones(3, 5, V, device="meta")}, NotImplementedError, "input: expected a CPU or CUDA tensor, got one on meta"),
    ({"target": 3}, TypeError, "target: expected a Tensor, got int"),
    ({"target": torch.ones(3, 5).long().to_sparse()}, TypeError, "target: expected a dense tensor, torch.strided, got torch."),
    ({"target": torch.ones(3, 5, device="meta").long()}, ValueError,
     "target: expected a tensor on cpu, where input is, got one on meta"),
    ({"target": torch.full((3, 5), 50), "valid_vocab": 50}, IndexError, "target[0]: expected 0 <= label < 50"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), TENSORS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_first_tensor_and_labels(
    name: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    if isinstance(first := changed.get("input"), Tensor) and first.dim() and "linear" in name:
        changed = {"input": first[..., :H]}
    refused(name, error, message, **changed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_of_another_type_or_shape(name: str) -> None:
    kind, message = TypeError, "target: expected int64, int32 or uint8, got torch."
    if name.endswith("cross_entropy"):
        kind, message = ValueError, FLOAT_LABELS
    for dtype in (torch.float32, torch.float64):
        refused(name, kind, f"{message}{str(dtype)[6:]}", target=torch.ones(3, 5, dtype=dtype))
    several = " or [3, 5, K]" if name.endswith("logprobs") else ""
    message = f"target: expected the leading shape of input, [3, 5]{several}, got "
    for shape in ([15], [3, 6]):
        refused(name, ValueError, f"{message}{shape}", target=torch.ones(shape).long())


UNEXPECTED = " got an unexpected keyword argument"
WORDS = "one set for all rows, or [3, 5, 3], a word for 32 columns, got "
OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("", {"temperature": 0.0}, ValueError, "temperature: expected a number > 0, got 0"),
    ("", {"temperature": torch.tensor(-1.0)}, ValueError, "temperature: expected a number > 0, got -1"),
    ("", {"temperature": "hot"}, ValueError, "temperature: expected a number, got 'hot'"),
    ("", {"temperature": [1.0]}, TypeError, "temperature: expected a number or a tensor of one element, got list"),
    ("", {"temperature": torch.ones(2)}, ValueError, "temperature: expected a number or a tensor of one element, got shape [2]"),
    ("", {"temperature": torch.tensor(2 + 3j)}, TypeError, "temperature: expected a real number with a value, got torch.complex"),
    ("", {"temperature": torch.ones((), device="meta")}, TypeError,
     "temperature: expected a real number with a value, got torch.float32 on meta"),
    ("", {"temperature_on": "rows"}, ValueError, "temperature_on: expected one of logits, logprob, got 'rows'"),
    ("", {"softcap": -1.0}, ValueError, "softcap: expected a number >= 0, got -1"),
    ("", {"softcap": torch.tensor(1.0)}, TypeError, "softcap: expected a number, got a tensor (only "),
    ("", {"logit_scale": 0.0}, ValueError, "logit_scale: expected a number > 0, got 0"),
    ("", {"logit_scale": float("nan")}, ValueError, "logit_scale: expected"),
    ("", {"valid_vocab": V + 1}, ValueError, "valid_vocab: expected"),
    ("", {"valid_vocab": 0}, ValueError, "valid_vocab: expected"),
    ("", {"temperature": torch.ones((), requires_grad=True)}, ValueError, "temperature: expected a tensor without gradient"),
    ("", {"ignore_index": 0.5}, TypeError, "ignore_index: expected an integer, got 0.5"),
    ("", {"ignore_index": float("inf")}, TypeError, "ignore_index: expected an integer, got inf"),
    ("", {"ignore_index": float("nan")}, ValueError, "ignore_index: expected a number, got nan"),
    ("", {"ignore_index": 2**64 - 100}, ValueError, "ignore_index: expected an integer of 64 bits, got 18446744073709551516"),
    ("", {"valid_vocab": 2**64 + V}, ValueError, "valid_vocab: expected an integer of 64 bits, got 18446744073709551683"),
    ("", {"allowed": torch.ones(3, 5, V).bool()}, TypeError, "allowed: expected int32 words (allowed_from), got torch.bool"),
    ("", {"allowed": torch.ones(3)}, TypeError, "allowed: expected int32 words (allowed_from), got torch.float32"),
    ("", {"allowed": torch.ones(3, 3).int()}, ValueError, f"allowed: expected shape [3], {WORDS}[3, 3]"),
    ("", {"allowed": torch.ones(4).int()}, ValueError, f"allowed: expected shape [3], {WORDS}[4]"),
    ("", {"allowed": [1, 2, 3]}, TypeError, "allowed: expected a Tensor, got list"),
    ("cross_entropy", {"reduction": "avg"}, ValueError, "reduction: expected one of none, sum, mean, got 'avg'"),
    ("cross_entropy", {"reduction": 1}, TypeError, "reduction: expected one of none, sum, mean, got 1"),
    ("cross_entropy", {"reduction": True}, TypeError, "reduction: expected one of none, sum, mean, got True"),
    ("cross_entropy", {"reduction": False}, TypeError, "reduction: expected one of none, sum, mean, got False"),
    ("cross_entropy", {"num_items": float("nan")}, ValueError, "num_items: expected a number, got nan"),
    ("cross_entropy", {"num_items": torch.tensor(float("nan"))}, ValueError, "num_items: expected a number, got nan"),
    ("cross_entropy", {"input": torch.ones(3, 5, V).to_sparse()}, TypeError, "input: expected a dense tensor, torch.strided"),
    ("cross_entropy", {"grad_in_forward": "no"}, TypeError, "grad_in_forward: expected True, False or None, got 'no'"),
    ("cross_entropy", {"token_weights": torch.ones(3, 5).to_sparse()}, TypeError, "token_weights: expected a dense tensor"),
    ("cross_entropy", {"label_smoothing": 1.5}, ValueError, "label_smoothing: expected"),
    ("cross_entropy", {"label_smoothing": -0.1}, ValueError, "label_smoothing: expected"),
    ("cross_entropy", {"z_loss": -1.0}, ValueError, "z_loss: expected a number >= 0, got -1"),
    ("cross_entropy", {"num_items": -1.0}, ValueError, "num_items: expected"),
    ("cross_entropy", {"token_weights": torch.ones(4)}, ValueError, "token_weights: expected target's shape [3, 5], or [15]"),
    ("cross_entropy", {"token_weights": [1.0]}, TypeError, "token_weights: expected a Tensor, got list"),
    ("cross_entropy", {"token_weights": torch.ones(3, 5, dtype=torch.complex64)}, TypeError, "token_weights: expected numbers"),
    ("cross_entropy", {"label_smoothing": 0.1, "temperature": 2.0, "temperature_on": "logprob"}, ValueError, "label_smoothing: "),
    ("logprobs", {"outputs": ("logp", "nope")}, ValueError, "outputs: expected names among logp, lse, "),
    ("logprobs", {"outputs": "logp"}, ValueError, f"outputs: expected a tuple of names among {ROW_OUTPUTS}, got 'logp'"),
    ("logprobs", {"outputs": ()}, ValueError, "outputs: expected"),
    ("policy_loss", {"return_metrics": "no"}, TypeError, "return_metrics: expected True or False, got 'no'"),
    ("policy_loss", {"preset": "ppo"}, ValueError, "preset: expected one of grpo"),
    ("policy_loss", {"kind": "trpo"}, ValueError, "kind: expected one of clip, cispo, sapo, vespo, reinforce, got 'trpo'"),
    ("policy_loss", {"aggregation": "mean"}, ValueError, "aggregation: expected one of seq_mean_token_mean"),
    ("policy_loss", {"preset": "cispo"}, ValueError, "epsilon_high: expected"),
    ("policy_loss", {"beta": 0.1}, ValueError, "ref_logp: expected"),
    ("policy_loss", {"sampler_correction": "mask"}, ValueError, "sampler_logp: expected"),
    ("policy_loss", {"epsilon_low": -0.1}, ValueError, "epsilon_low: expected a number >= 0, got -0.1"),
    ("policy_loss", {"mask": torch.ones(3, 4)}, ValueError, "mask: expected target's shape [3, 5], or [15], got [3, 4]"),
    ("policy_loss", {"old_logp": torch.ones(5)}, ValueError, "old_logp: expected target's shape [3, 5], or [15], got [5]"),
    ("policy_loss", {"advantages": torch.ones(4)}, ValueError, "advantages.size: expected 3"),
    ("policy_loss", {"advantages": torch.ones(3, 4), "advantage_level": "token"}, ValueError,
     "advantages: expected target's shape [3, 5], or [15], got [3, 4]"),
    ("policy_loss", {"advantages": [1.0]}, TypeError, "advantages: expected a Tensor, got list"),
    ("policy_loss", {"sequence_offsets": torch.tensor([0, 4, 9, 14])}, ValueError, "sequence_offsets"),
    ("policy_loss", {"sequence_offsets": torch.tensor([0, 9, 4, 15])}, ValueError, "sequence_offsets"),
    ("policy_loss", {"sequence_offsets": torch.ones(4)}, TypeError, "sequence_offsets: expected integers, got torch.float32"),
    ("policy_loss", {"sequence_offsets": torch.ones(4).double()}, TypeError, "sequence_offsets: expected integers, got"),
    ("policy_loss", {"sequence_offsets": torch.ones(1, 4).long()}, ValueError, "sequence_offsets: expected one dimension"),
    ("policy_loss", {"kl_importance": 1}, TypeError, "kl_importance: expected one of false, true, got 1"),
    ("cross_entropy", {"num_items": 3.0, "reduction": "sum"}, ValueError, "num_items: expected none with reduction = sum"),
    ("cross_entropy", {"num_items": torch.tensor(3.0), "reduction": "none"}, ValueError, "num_items: expected none with"),
    ("policy_loss", {"delta": 2.0, "preset": "cispo", "epsilon_high": 5.0}, ValueError, "delta: expected none with kind = cispo"),
    ("policy_loss", {"tau_pos": 2.0}, ValueError, "tau_pos: expected none with kind = clip, only with sapo, got a number"),
    ("policy_loss", {"max_length": 9, "preset": "bnpo"}, ValueError, "max_length: expected none with aggregation = token_mean"),
    ("policy_loss", {"sampler_min": 0.5}, ValueError, "sampler_min: expected none with sampler_correction = off, only with"),
    ("policy_loss", {"not_an_option": 1}, TypeError, "policy_loss() got an unexpected keyword"),
    ("policy_loss", {"clip_ratio_c": 3.0}, TypeError, f"policy_loss(){UNEXPECTED} 'clip_ratio_c'; here that is dual_clip"),
    ("policy_loss", {"token_weights": torch.ones(3, 5)}, TypeError, f"policy_loss(){UNEXPECTED} 'token_weights'; multiply by"),
    ("logprobs", {"mask": torch.ones(3, 5)}, TypeError, f"logprobs(){UNEXPECTED} 'mask'; give the rows that do not count"),
    ("cross_entropy", {"where": torch.ones(3, 5)}, TypeError, f"cross_entropy(){UNEXPECTED} 'where'; here that is mask"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "changed", "error", "message"), OPTIONS, ids=lambda v: str(v)[:40]
)
@pytest.mark.parametrize("linear", [False, True], ids=["", "linear"])
def test_options(
    function: str, changed: dict[str, Any], error: type[Exception], message: str, linear: bool
) -> None:
    prefix = "linear_" if linear else ""
    for name in [function] if function else LOGIT_FUNCTIONS:
        shown = prefix + message if message.startswith(f"{function}(") else message
        refused(prefix + name, error, shown, **changed)


def ids_with(row: int, *ids: int) -> Tensor:
    given = IDS.clone()
    given.view(15, 2)[row] = torch.tensor(ids)
    return given


LEARNED = torch.zeros(3, 5, V, requires_grad=True)
TARGETS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("cross_entropy", {"target": torch.zeros(3, 5, V), "z_loss": 0.1}, ValueError,
     "z_loss: expected 0 with class probabilities, got 0.1"),
    ("cross_entropy", {"target": LEARNED}, ValueError, "target: expected a tensor without gradient"),
    ("distillation", {"teacher": LEARNED}, ValueError, "teacher: expected a tensor without gradient"),
    ("distillation", {"teacher": torch.zeros(3, 5, 7)}, ValueError, f"teacher: expected input's shape [3, 5, {V}], got"),
    ("distillation", {"teacher": torch.zeros(3, 5, V).bfloat16()}, TypeError,
     "teacher: expected input's dtype torch.float32, got"),
    ("distillation", {"label_weight": 0.5, "target": None}, ValueError,
     "target: expected a vector, as label_weight is not 0, got none"),
    ("distillation", {"divergence": "jsd", "beta": 1.0}, ValueError,
     "beta: expected a number > 0 and < 1 with this divergence"),
    ("distillation", {"divergence": "kl"}, ValueError, f"divergence: expected one of {KINDS}, got 'kl'"),
    ("distillation", {"outputs": ("margin",)}, ValueError, f"outputs: expected names among {PAIR_ROWS}, got ['margin']"),
    ("distillation", {"inplace_backward": "no"}, TypeError, "inplace_backward: expected True or False, got 'no'"),
    ("linear_distillation", {"teacher_input": torch.zeros(3, 4, H)}, ValueError,
     f"teacher_input: expected shape [3, 5, G], got [3, 4, {H}]"),
    ("linear_distillation", {"teacher_weight": torch.zeros(V, 17)}, ValueError,
     f"teacher_weight: expected shape [{V}, {H}], got [{V}, 17]"),
    ("linear_distillation", {"teacher_bias": torch.zeros(5)}, ValueError, f"teacher_bias: expected shape [{V}], got [5]"),
    ("linear_distillation", {"teacher_input": torch.zeros(3, 5, H).long()}, TypeError, f"teacher_input: {TYPES}int64"),
    ("linear_distillation", {"teacher_input": torch.zeros(3, 5, H, requires_grad=True)}, ValueError,
     "teacher_input: expected a tensor without"),
    ("linear_distillation", {"label_weight": 0.5, "target": None}, ValueError,
     "target: expected a vector, as label_weight is not 0, got none"),
    ("linear_distillation", {"outputs": ("entropie",)}, ValueError, f"outputs: expected names among {PAIR_ROWS}, got"),
    ("sparse_distillation", {"teacher_ids": ids_with(2, 1, V)}, ValueError, f"teacher_ids[2,1]: expected a column < {V}"),
    ("sparse_distillation", {"teacher_ids": ids_with(1, 3, 3)}, ValueError,
     "teacher_ids[1]: expected distinct columns, got 3 twice"),
    ("sparse_distillation", {"teacher_ids": torch.zeros(3, 5, 2)}, TypeError,
     "teacher_ids: expected int64 or int32, got torch.float32"),
    ("sparse_distillation", {"teacher_ids": IDS[:1]}, ValueError, "teacher_ids: expected shape [3, 5, K], got [1, 5, 2]"),
    ("sparse_distillation", {"teacher_ids": IDS[..., :1]}, ValueError,
     "teacher_logprobs: expected teacher_ids' shape [3, 5, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changed", "error", "message"), TARGETS, ids=lambda v: str(v)[:40]
)
def test_targets_that_are_not_labels(
    name: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    refused(name, error, message, **changed)


ROWS = ("mask", "old_logp", "ref_logp", "sampler_logp", "advantages")


@pytest.mark.parametrize("shape", [(5, 3), (3, 5, 1), (1, 15), (1, 3, 5)], ids=str)
def test_as_many_numbers_of_another_shape(shape: tuple[int, ...]) -> None:
    """They would go to other rows than they were meant for."""
    message, numbers = "expected target's shape [3, 5], or [15], got ", torch.rand(3, 5)
    for prefix in ("", "linear_"):
        name = f"{prefix}cross_entropy"
        wrong = {"token_weights": numbers.view(shape)}
        refused(name, ValueError, f"token_weights: {message}{list(shape)}", **wrong)
        name = f"{prefix}policy_loss"
        given = dict.fromkeys(ROWS, numbers) | {"advantage_level": "token", "beta": 0.1}
        for row in ROWS:
            wrong = {**given, row: numbers.view(shape)}
            refused(name, ValueError, f"{row}: {message}{list(shape)}", **wrong)


@pytest.mark.parametrize("linear", [False, True], ids=["", "linear"])
def test_numbers_of_rows_may_be_flat(linear: bool) -> None:
    p, prefix = problem(), "linear_" if linear else ""
    first = (p.hidden, p.weight) if linear else (p.logits,)
    losses = []
    for numbers in (p.row_weights, p.row_weights.view(-1)):
        given = dict.fromkeys(ROWS, numbers) | {"advantage_level": "token", "beta": 0.1}
        losses += [
            getattr(tl, f"{prefix}cross_entropy")(*first, p.labels, token_weights=numbers),
            getattr(tl, f"{prefix}policy_loss")(*first, p.labels, **given),
        ]
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])


@pytest.mark.parametrize("shape", [(1, 3), (5, 3), (3, 1, 1), ()], ids=str)
def test_advantages_of_sequences_of_another_shape(shape: tuple[int, ...]) -> None:
    message = "advantages: expected [B] or [B, 1] of sequences, or target's shape [3, 5], got "
    advantages = torch.ones(shape)
    for name in ("policy_loss", "linear_policy_loss"):
        refused(name, ValueError, f"{message}{list(shape)}", advantages=advantages)


def test_numbers_that_would_need_a_gradient_are_taken_without_one() -> None:
    p, temperature = problem(), torch.tensor(1.3, requires_grad=True)
    expected = tl.cross_entropy(p.logits, p.labels, temperature=temperature.detach())
    with torch.no_grad():
        assert torch.equal(tl.cross_entropy(p.logits, p.labels, temperature=temperature), expected)


ALONGSIDE = {
    "cross_entropy": {"weight": torch.ones(V), "token_weights": torch.ones(3, 5)},
    "linear_cross_entropy": {"weight": torch.ones(V), "token_weights": torch.ones(3, 5)},
    "policy_loss": {"advantages": torch.ones(3)} | {name: torch.ones(3, 5) for name in ROWS[:-1]},
    "linear_policy_loss": dict.fromkeys(ROWS, torch.ones(3, 5)),
}


@pytest.mark.parametrize("name", ALONGSIDE)
def test_tensors_that_would_need_a_gradient(name: str) -> None:
    """It was silently lost. Without gradients they are taken as they are."""
    for argument, numbers in ALONGSIDE[name].items():
        learned = {argument: numbers.clone().requires_grad_()}
        message = f"{argument}: expected a tensor without gradient, as it is not differentiated"
        refused(name, ValueError, message, **learned)
        with torch.no_grad():
            with forward_ad.dual_level():
                dual = {argument: forward_ad.make_dual(numbers, numbers)}
                refused(name, NotImplementedError, "tileloss: forward-mode", **dual)
            losses = []
            for given in (learned, {argument: numbers}):
                torch.manual_seed(0)  # the same problem for both
                losses.append(call(name, **given))
        assert torch.equal(*losses)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_class_weights_have_the_name_of_the_argument(name: str) -> None:
    for weight in (torch.ones(V - 1), torch.ones(V + 1)):
        message = f"weight.size: expected {V}, got {len(weight)}"
        refused(name, ValueError, message, weight=weight)
    wide = f"weight: expected one dimension, got [1, {V}]"
    refused(name, ValueError, wide, weight=torch.ones(1, V))
    refused(name, TypeError, "weight: expected a Tensor, got float", weight=1.0)
    meta = torch.ones(V, device="meta")
    refused(name, ValueError, "weight: expected a tensor on cpu, where input is", weight=meta)


SHARED = torch.ones(V, H)
HEAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"linear_weight": torch.ones(H, V)}, ValueError,
     f"linear_weight: expected shape [V, {H}], as input's last dimension, got [{H}, {V}]"),
    ({"linear_weight": torch.ones(H)}, ValueError, f"linear_weight: expected shape [V, {H}]"),
    ({"linear_weight": torch.ones(V, H).double()}, TypeError,
     "linear_weight: expected float32, bfloat16 or float16, got torch.float64"),
    ({"linear_weight": torch.ones(V, H, device="meta")}, ValueError, "linear_weight: expected a tensor on cpu, where input is"),
    ({"linear_weight": quantized((V, H), Opaque)}, TypeError,
     "linear_weight: expected a plain tensor, got the wrapper subclass wrapped_tensors.Opaque, which has no method dequantize"),
    ({"linear_weight": quantized((V, H)).requires_grad_()}, TypeError,
     "linear_weight: expected a plain tensor, got the wrapper subclass wrapped_tensors.Quantized, which requires a gradient"),
    ({"linear_bias": torch.ones(V - 1)}, ValueError, f"linear_bias: expected shape [{V}], got [{V - 1}]"),
    ({"linear_bias": torch.ones(1, V)}, ValueError, f"linear_bias: expected shape [{V}], got [1, {V}]"),
    ({"linear_bias": torch.ones(V).double()}, TypeError, "linear_bias: expected float32, bfloat16 or float16, got torch.float64"),
    ({"compute_dtype": torch.float16}, ValueError, "compute_dtype: expected torch.float32 or torch.bfloat16, got torch.float16"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes: expected >= 1, got 0"),
    ({"workspace_bytes": "1"}, TypeError, "workspace_bytes: expected an integer >= 1, got '1'"),
    ({"workspace_bytes": 1e6}, TypeError, "workspace_bytes: expected an integer >= 1, got 1000000.0"),
    ({"workspace_bytes": 2**63}, ValueError, "workspace_bytes: expected >= 1"),
    ({"input": torch.ones(3, 5, 0), "linear_weight": torch.ones(V, 0)}, ValueError,
     "input: expected a last dimension of at least 1"),
    ({"workspace_bytes": 64}, ValueError, "workspace_bytes: expected"),
    *(({"linear_weight_grad": given}, error, f"linear_weight_grad: expected {message}") for given, error, message in [
        (1.0, TypeError, "a Tensor, got float"),
        (torch.zeros(V, H).bfloat16(), TypeError, "float32, got torch.bfloat16"),
        (torch.zeros(H, V), ValueError, f"linear_weight's shape [{V}, {H}], got [{H}, {V}]"),
        (torch.zeros(V, H, device="meta"), ValueError, "a tensor on cpu, where input is, got one on meta"),
        (torch.zeros(H).expand(V, H), ValueError, "elements that each have memory of their own, got strides [0, 1]"),
        (torch.zeros(V, H, dtype=torch.complex64).conj().imag, ValueError,
         f"elements that each have memory of their own, got strides [{2 * H}, 2], negated"),
        (torch.zeros(V, H, requires_grad=True), ValueError, "a tensor without gradient, got one that requires it"),
        (quantized((V, H)), TypeError, "a plain tensor, got Quantized"),
    ]),
    ({"linear_weight": torch.ones(V, H), "linear_weight_grad": torch.zeros(V, H)}, ValueError,
     "linear_weight_grad: expected None, as linear_weight requires no gradient, got a tensor to add it to"),
    ({"linear_weight": SHARED.detach().requires_grad_(), "linear_weight_grad": SHARED}, ValueError,
     "linear_weight_grad: expected memory apart from linear_weight's, got the same"),
    ({"input": SHARED.flatten()[: 15 * H].view(3, 5, H), "linear_weight_grad": SHARED}, ValueError,
     "linear_weight_grad: expected memory apart from input's, got the same"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), HEAD, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("name", LINEAR_FUNCTIONS)
def test_the_head(name: str, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(name, error, message, **changed)


@pytest.mark.parametrize("name", LINEAR_FUNCTIONS)
def test_a_heads_gradient_that_cannot_be_added(name: str) -> None:
    head_grad = torch.zeros(V, H)

    def total(**given: Any) -> Tensor:
        result = call(name, **{"linear_weight_grad": head_grad, **given})
        return (result if isinstance(result, Tensor) else result.logp).sum()

    if not name.endswith("logprobs"):
        message = "grad_in_forward: expected None or False with linear_weight_grad, as only"
        refused(name, ValueError, message, linear_weight_grad=head_grad, grad_in_forward=True)
    total()  # calls alike are not checked again, but for where the memory lies
    with pytest.raises(ValueError, match="^linear_weight_grad: .* apart from linear_weight's"):
        total(linear_weight=head_grad.detach().requires_grad_())
    both = torch.ones(2 * V, H)
    loss = total(
        linear_weight=both[:V].requires_grad_(), linear_weight_grad=both[1 : V + 1].detach()
    )
    with pytest.raises(
        ValueError, match="^linear_weight_grad.data: expected a buffer apart from linear_weight,"
    ):
        loss.backward()
    weight = torch.ones(V, H, requires_grad=True)
    for given, message in (({"is_grads_batched": True}, "linear_weight_grad: .* got is_grads_"),
                           ({"is_grads_batched": True, "create_graph": True}, "tileloss: double backward")):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^{message}"):
            torch.autograd.grad(total(linear_weight=weight), weight, torch.ones(2), **given)
    assert not head_grad.any()
