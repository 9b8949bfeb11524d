"""LogProbFunction against TRL's own function and against the definition in float64."""

from typing import Any, NamedTuple

import pytest
import torch
from trl.trainer.utils import _ChunkedLogProbFunction as OwnFunction

import definitions
from tileloss.integrations.trl import LogProbFunction
from tileloss.torch import call_counts

N, H, V = 37, 24, 301
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
CHUNK = 128  # three tiles of TRL's, the last one narrower

# The largest error against float64, of the outputs (absolute) and of a gradient (relative to its
# largest entry). float32: some 24 products a logit and 301 terms a sum. With bfloat16, dz is
# rounded before its products, 2^-9 of each of the terms of a sum, and the gradient when it is
# stored, 2^-9 again; the outputs come from exact products, summed in float32.
OUTPUT_BOUND = 1e-5
GRADIENT_BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}


class Inputs(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    logp_grad: torch.Tensor
    entropy_grad: torch.Tensor


def make_inputs(dtype: torch.dtype, has_bias: bool) -> Inputs:
    torch.manual_seed(5)
    weight = (torch.randn(V, H) * 0.5).to(dtype)
    targets = torch.randint(0, V, (N,))
    hidden = torch.randn(N, H)
    hidden[::3] = weight[targets[::3]].float() * 2  # some labels are the most likely token
    bias = torch.randn(V).to(dtype) if has_bias else None
    return Inputs(hidden.to(dtype), weight, bias, targets, torch.randn(N), torch.randn(N))


def run(
    apply: Any,
    inputs: Inputs,
    outputs: tuple[str, ...] = ALL,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[list, list]:
    """The outputs, and hidden's, weight's and bias's gradients of
    <logp, logp_grad> + <entropy, entropy_grad>.
    """
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs[:3]]
    rows = apply(*leaves, inputs.targets, temperature, CHUNK, softcap, logit_scale, outputs)
    value = (rows[0] * inputs.logp_grad.to(rows[0].dtype)).sum()
    if rows[1] is not None:
        value = value + (rows[1] * inputs.entropy_grad.to(rows[1].dtype)).sum()
    value.backward()
    return [None if x is None else x.detach() for x in rows], [
        None if x is None else x.grad for x in leaves
    ]


def definition(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> tuple[torch.Tensor, ...]:
    """The same in the type of the inputs, float64."""
    del chunk_size, outputs
    transform = {"temperature": temperature, "softcap": softcap or 0.0, "logit_scale": logit_scale}
    x = torch.nn.functional.linear(hidden, weight, bias)
    rows = definitions.row_outputs(x, targets, **transform)[0]
    taken = (rows.log_sum_sq_probs.detach(), rows.mean_logit.detach(), rows.correct)
    return rows.logp, rows.entropy, *taken


def in_float64(inputs: Inputs) -> Inputs:
    return Inputs(*(x.double() if x is not None and x.is_floating_point() else x for x in inputs))


def worst(values: list, expected: list) -> float:
    return max(
        float((v.double() - e.double()).abs().max())
        for v, e in zip(values, expected, strict=True)
        if e is not None
    )


def worst_relative(values: list, expected: list) -> float:
    return max(
        float((v.double() - e.double()).abs().max() / e.double().abs().max())
        for v, e in zip(values, expected, strict=True)
        if e is not None
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"softcap": 3.0},
        {"logit_scale": 0.25, "softcap": 5.0, "temperature": 1.3},
    ],
    ids=["plain", "temperature", "softcap", "all"],
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_output_and_gradient_is_as_defined_and_no_worse_than_trls(dtype, has_bias, options):
    inputs = make_inputs(dtype, has_bias)
    exact, exact_gradients = run(definition, in_float64(inputs), **options)
    own, own_gradients = run(OwnFunction.apply, inputs, **options)
    ours, our_gradients = run(LogProbFunction.apply, inputs, **options)

    assert [x.dtype for x in ours] == [x.dtype for x in own]
    assert [x.shape for x in ours] == [x.shape for x in own]
    assert [None if x is None else x.dtype for x in our_gradients] == [
        None if x is None else x.dtype for x in own_gradients
    ]
    assert torch.equal(ours[4], exact[4])
    assert 0 < int(exact[4].sum()) < N
    assert worst(ours[:4], exact[:4]) <= OUTPUT_BOUND
    assert worst_relative(our_gradients, exact_gradients) <= GRADIENT_BOUND[dtype]
    # TRL's own rounds the logits to hidden's type: float32 results agree closely, the others'
    # errors are at least as large.
    if dtype == torch.float32:
        assert worst(ours[:4], own[:4]) <= OUTPUT_BOUND
        assert worst_relative(our_gradients, own_gradients) <= GRADIENT_BOUND[dtype]
    else:
        assert worst(ours[:4], exact[:4]) <= worst(own[:4], exact[:4])
        assert worst_relative(our_gradients, exact_gradients) <= 1.1 * worst_relative(
            own_gradients, exact_gradients
        )


@pytest.mark.parametrize(
    "outputs", [("log_probs",), ("entropy",), ("log_probs", "mean_logits", "is_top1"), ()]
)
def test_outputs_not_asked_for_are_none_and_log_probs_is_always_there(outputs):
    inputs = make_inputs(torch.float32, has_bias=False)
    own, own_gradients = run(OwnFunction.apply, inputs, outputs)
    ours, our_gradients = run(LogProbFunction.apply, inputs, outputs)
    assert [x is None for x in ours] == [x is None for x in own]
    assert worst(ours, own) <= OUTPUT_BOUND
    assert worst_relative(our_gradients, own_gradients) <= GRADIENT_BOUND[torch.float32]


def test_only_logp_and_entropy_are_differentiable():
    inputs = make_inputs(torch.float32, has_bias=False)
    rows = LogProbFunction.apply(inputs.hidden.clone().requires_grad_(), *inputs[1:4], 1.0, CHUNK)
    assert [x.requires_grad for x in rows] == [True, True, False, False, False]


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_made_in_trls_type(hidden_dtype, weight_dtype, autocast):
    """Autocast's type or hidden's, whatever the head's is (a float32 master copy under FSDP)."""
    float32 = make_inputs(torch.float32, has_bias=True)
    inputs = float32._replace(
        hidden=float32.hidden.to(hidden_dtype), weight=float32.weight.to(weight_dtype)
    )
    compute = torch.bfloat16 if autocast else hidden_dtype
    rounded = inputs._replace(hidden=inputs.hidden.to(compute), weight=inputs.weight.to(compute))
    exact, exact_gradients = run(definition, in_float64(rounded))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, our_gradients = run(LogProbFunction.apply, inputs)
    assert worst(ours[:4], exact[:4]) <= OUTPUT_BOUND
    assert [x.dtype for x in our_gradients] == [hidden_dtype, weight_dtype, torch.float32]
    low = torch.bfloat16 in (compute, hidden_dtype, weight_dtype)
    assert (
        worst_relative(our_gradients, exact_gradients)
        <= GRADIENT_BOUND[torch.bfloat16 if low else torch.float32]
    )


def test_no_rows_give_empty_outputs_and_zero_gradients():
    inputs = make_inputs(torch.float32, has_bias=True)
    none = Inputs(inputs.hidden[:0], inputs.weight, inputs.bias, *(x[:0] for x in inputs[3:]))
    rows, gradients = run(LogProbFunction.apply, none)
    assert [x.shape for x in rows] == [(0,)] * 5
    assert [float(x.abs().sum()) for x in gradients] == [0.0, 0.0, 0.0]


def test_it_runs_on_tileloss():
    before = call_counts()
    run(LogProbFunction.apply, make_inputs(torch.float32, has_bias=False))
    after = call_counts()
    called = {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count != before.get(name, 0)
    }
    assert called == {"linear_logprobs/forward": 1, "linear_logprobs/backward": 1}


def test_other_devices_are_refused():
    inputs = make_inputs(torch.float32, has_bias=False)
    with pytest.raises(
        NotImplementedError,
        match=r"expected hidden states on the CPU or a CUDA device, got them on meta; unpatch\(\)",
    ):
        LogProbFunction.apply(inputs.hidden.to("meta"), *inputs[1:4], 1.0, CHUNK)


def test_a_partitioned_head_is_refused_in_training_only(monkeypatch):
    from transformers.integrations import deepspeed

    monkeypatch.setattr(deepspeed, "is_deepspeed_zero3_enabled", lambda: True)
    inputs = make_inputs(torch.float32, has_bias=False)
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        LogProbFunction.apply(*inputs[:4], 1.0, CHUNK)
    with torch.no_grad():
        assert LogProbFunction.apply(*inputs[:4], 1.0, CHUNK)[0].shape == (N,)
