"""As a training loop uses the functions: checkpointing, accumulation, tied weights, modules and what is saved of them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tileloss import torch as tl
from torch_problems import ALL_FUNCTIONS, FUNCTIONS, OF_TORCH_2_15, H, V, gradients, problem, run


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    """The loss inside the checkpoint: its forward runs again in the backward."""
    p = problem()
    expected = gradients(name, p)
    leaves = p.leaves(name)

    def block(*inputs: Tensor) -> Tensor:
        return run(name, p, *(x * 1 for x in inputs))

    loss = checkpoint(block, *leaves, use_reentrant=reentrant)
    loss.backward()
    assert torch.equal(loss, expected[0])
    for x, gradient in zip(leaves, expected[1:], strict=True):
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("one_pass", [True, False])
def test_micro_batches_with_num_items_are_one_batch(name: str, one_pass: bool) -> None:
    p = problem()
    loss, *expected = gradients(name, p, grad_in_forward=one_pass)
    num_items = int((p.labels != -100).sum())
    leaves = p.leaves(name)
    total = torch.zeros(())
    for rows, labels in zip(leaves[0], p.labels, strict=True):
        mode = {"num_items": num_items, "grad_in_forward": one_pass}
        part = run(name, replace(p, labels=labels), rows, *leaves[1:], **mode)
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, loss, rtol=1e-6, atol=1e-7)
    for x, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-5, atol=1e-8)


def test_tied_embeddings_get_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(V, H)
            self.loss = tl.LinearCrossEntropyLoss(H, V)
            self.loss.linear.weight = self.embedding.weight

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.embedding(tokens), labels)

    model, tokens = Tied(), torch.randint(0, V, (2, 9))
    assert len(list(model.parameters())) == 1
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    weight = model.embedding.weight.detach().double().requires_grad_()
    logits = nn.functional.embedding(tokens[:, :-1], weight) @ weight.T
    exact = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (gradient,) = torch.autograd.grad(exact, weight)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.embedding.weight.grad.double(), gradient, rtol=1e-4, atol=1e-7)


def test_an_optimizer_in_the_backward_steps_a_tied_head_once() -> None:
    """`register_post_accumulate_grad_hook`: the step waits for both of the weight's gradients."""
    ends = []
    for loss_of in (tl.linear_cross_entropy, plain_linear_cross_entropy):
        torch.manual_seed(0)
        weight, steps = nn.Parameter(torch.randn(V, H)), []
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def step(weight: Tensor, optimizer: Any = optimizer, steps: list[float] = steps) -> None:
            optimizer.step()
            optimizer.zero_grad()
            steps.append(1)

        weight.register_post_accumulate_grad_hook(step)
        tokens = torch.randint(0, V, (2, 9))
        for _ in range(3):
            hidden = nn.functional.embedding(tokens[:, :-1], weight)
            loss_of(hidden, weight, tokens[:, 1:]).backward()
        assert len(steps) == 3 and weight.grad is None
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("one_pass", [True, False])
def test_losses_of_several_tokens_ahead_share_a_head(one_pass: bool) -> None:
    """Multi-token prediction: one backward of K losses, whose gradients of the head are added up."""
    weight, hidden = torch.randn(V, H, requires_grad=True), torch.randn(3, 2, 9, H)
    hidden.requires_grad_()
    tokens = torch.randint(0, V, (2, 12))

    def gradients_of(loss_of: Any) -> tuple[Tensor, ...]:
        losses = [loss_of(hidden[k], weight, tokens[:, k : k + 9]) for k in range(3)]
        total = losses[0] + 0.3 * losses[1] + 0.1 * losses[2]
        return total, *torch.autograd.grad(total, (hidden, weight))

    ours = gradients_of(partial(tl.linear_cross_entropy, grad_in_forward=one_pass))
    for found, exact in zip(ours, gradients_of(plain_linear_cross_entropy), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


LINEAR = [name for name in ALL_FUNCTIONS if "linear" in name]


def test_256_micro_batches_are_summed_with_one_float32_rounding_each() -> None:
    weight = (0.3 * torch.randn(V, H)).bfloat16().requires_grad_()
    double = weight.detach().double().requires_grad_()
    summed, one_by_one, exact = torch.zeros(V, H), torch.zeros(V, H), torch.zeros(V, H).double()
    for _ in range(256):
        hidden, labels = torch.randn(16, H).bfloat16(), torch.randint(0, V, (16,))
        one = torch.zeros(V, H)
        for head_grad in (summed, one, None):
            loss = tl.linear_cross_entropy(
                hidden, weight, labels, compute_dtype=torch.float32, linear_weight_grad=head_grad
            )
            (loss / 255).backward()
        one_by_one += one
        plain = nn.functional.cross_entropy(hidden.double() @ double.T, labels) / 255
        exact += torch.autograd.grad(plain, double)[0]
    assert torch.equal(summed, one_by_one)
    ours, autograds = ((g.double() - exact).norm() / exact.norm() for g in (summed, weight.grad))
    print(f"error of the sum: {ours:.1e}, of autograd's in bfloat16: {autograds:.1e}")
    assert ours < 5e-7  # 2.3e-7
    assert autograds > 0.01  # 1.7e-2


def laid_out(how: str) -> Tensor:
    """A [V, H] tensor to add to, and what lies between its rows."""
    if how == "rows apart":
        return torch.full((V, H + 3), 7.0)[:, :H]
    return torch.full((H, V), 7.0).T if how == "transposed" else torch.full((V, H), 7.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_a_heads_gradient_is_added_to_a_float32_tensor(name: str, dtype: torch.dtype) -> None:
    """With any upstream gradient, however it lies, at any number of threads, in calls that are alike."""
    p, threads = problem(dtype), torch.get_num_threads()
    leaves = p.leaves(name)
    mode = {} if name.endswith("logprobs") else {"grad_in_forward": False}
    for factor in (1.0, 0.37):
        loss = factor * run(name, p, *leaves, **mode)
        expected = torch.autograd.grad(loss, leaves)
        added = torch.zeros(V, H)
        (factor * run(name, p, *leaves, linear_weight_grad=added)).backward()
        torch.testing.assert_close(added.to(dtype), expected[1], rtol=2e-2, atol=1e-6)
        for how in ("contiguous", "rows apart", "transposed"):
            for count in (1, 3):
                head_grad = laid_out(how)
                for x in leaves:
                    x.grad = None
                torch.set_num_threads(count)
                try:
                    ours = factor * run(name, p, *leaves, linear_weight_grad=head_grad)
                    ours.backward()
                finally:
                    torch.set_num_threads(threads)
                assert torch.equal(ours, loss)
                assert torch.equal(head_grad, 7 + added)
                assert leaves[1].grad is None
                assert torch.equal(leaves[0].grad, expected[0])
                assert torch.equal(leaves[2].grad, expected[2])
                if how == "rows apart":
                    assert (head_grad._base[:, H:] == 7).all()


def test_when_a_heads_gradient_is_added() -> None:
    """Once by each backward."""
    p, name = problem(), "linear_cross_entropy"
    leaves = p.leaves(name)

    def added(of: Any) -> Tensor:
        head_grad = torch.zeros(V, H)
        of(partial(run, name, p, *leaves, linear_weight_grad=head_grad), head_grad)
        return head_grad

    once = added(lambda loss, _: loss().backward())
    assert once.abs().max() > 0

    def retained(loss: Any, _: Tensor) -> None:
        kept = loss()
        kept.backward(retain_graph=True)
        kept.backward()

    assert torch.equal(added(retained), 2 * once)
    assert torch.equal(added(lambda loss, _: (loss() + loss()).backward()), 2 * once)
    for reentrant in (True, False):

        def checkpointed(loss: Any, head_grad: Tensor, reentrant: bool = reentrant) -> None:
            def block(*inputs: Tensor) -> Tensor:
                return run(name, p, *inputs, linear_weight_grad=head_grad)

            checkpoint(block, *leaves, use_reentrant=reentrant).backward()

        assert torch.equal(added(checkpointed), once)
    # autograd does not tell a function which of its gradients are asked for.
    assert torch.equal(added(lambda loss, _: torch.autograd.grad(loss(), leaves[0])), once)
    assert not added(lambda loss, _: loss()).any()
    assert not added(lambda loss, _: torch.no_grad()(loss)()).any()
    with torch.autocast("cpu", torch.bfloat16):
        cast = added(lambda loss, _: loss().backward())
    narrow = added(lambda loss, _: loss(compute_dtype=torch.bfloat16).backward())
    assert torch.equal(cast, narrow) and not torch.equal(cast, once)
    version = []
    added(lambda loss, head_grad: (loss().backward(), version.append(head_grad._version)))
    assert version == [1]


# ------------------------------------------------------------------------------------------------- modules


class Made(NamedTuple):
    module: nn.Module
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    function: Callable[..., Tensor]


def modules() -> dict[str, Made]:
    p, classes = problem(), {"weight": torch.rand(V)}
    logprobs, ids = p.teacher.log_softmax(-1).topk(4)
    mixed = {"label_weight": 0.3, "divergence_weight": 0.7}
    two_heads = p.teacher_hidden, p.weight.detach()
    bonus = {"preset": "dapo", "entropy_coef": 0.1, "entropy_reduction": "as_loss"}
    rows: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
        "cross_entropy": (classes | {"label_smoothing": 0.1}, (p.logits, p.labels)),
        "linear_cross_entropy": (classes | {"z_loss": 1e-3}, (p.hidden, p.labels)),
        "policy_loss": ({"preset": "dapo", "beta": 0.0}, (p.logits, p.labels, p.advantages)),
        "linear_policy_loss": (bonus, (p.hidden, p.labels, p.advantages)),
        "distillation": (mixed, (p.logits, p.teacher, p.labels)),
        "linear_distillation": (mixed, (p.hidden, *two_heads, p.labels)),
        "sparse_distillation": (mixed, (p.logits, ids, logprobs, p.labels)),
        "linear_sparse_distillation": (mixed | {"tail": "ignore"}, (p.hidden, ids, logprobs, p.labels)),
    }  # fmt: skip
    made = {}
    for function, (options, inputs) in rows.items():
        name = "".join(word.title() for word in f"{function.removesuffix('_loss')}_loss".split("_"))
        given, head = dict(options), (H, V) if function.startswith("linear") else ()
        place = [given.pop("preset")] if "preset" in given else []
        module = getattr(tl, name)(*head, *place, **given, **{"bias": True} if head else {})
        made[name] = Made(module, inputs, options, getattr(tl, function))
    return made


NAMES = list(modules())


@pytest.mark.parametrize("name", NAMES)
def test_what_a_call_names_the_function_gets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, *_ = modules()[name]
    parameters = inspect.signature(module.forward).parameters.values()
    given = {each.name: object() for each in parameters if each.kind is each.KEYWORD_ONLY}
    seen: dict[str, Any] = {}
    monkeypatch.setattr(type(module), "_function", lambda *_, **named: seen.update(named))
    module(*inputs, **given)
    assert given and {each: seen[each] for each in given} == given


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_their_functions(name: str) -> None:
    module, (first, *rest), options, function = modules()[name]
    head, bias = (), {}
    if "Linear" in name:
        head, bias = (module.linear.weight,), {"linear_bias": module.linear.bias}
    assert torch.equal(module(first, *rest), function(first, *head, *rest, **bias, **options))


@pytest.mark.parametrize("name", [name for name in NAMES if "Linear" in name])
def test_modules_add_to_a_tensor_that_is_assigned(name: str) -> None:
    module, inputs, *_ = modules()[name]
    names = list(module.state_dict())
    module(*inputs).backward()
    gradient, module.linear.weight.grad = module.linear.weight.grad, None
    module.linear_weight_grad = torch.zeros(V, H)
    module(*inputs).backward()
    torch.testing.assert_close(module.linear_weight_grad, gradient, rtol=1e-5, atol=1e-8)
    assert module.linear.weight.grad is None and list(module.state_dict()) == names


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_copied_pickled_and_restored(name: str) -> None:
    module, inputs, *_ = modules()[name]
    expected = module(*inputs)
    other, *_ = modules()[name]
    if list(module.state_dict()):
        assert not torch.equal(other(*inputs), expected)
    other.load_state_dict(module.state_dict())
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        assert torch.equal(same(*inputs), expected)


def test_what_modules_save() -> None:
    saved = {name: list(module.state_dict()) for name, (module, *_) in modules().items()}
    assert saved == {
        "CrossEntropyLoss": ["weight"],
        "LinearCrossEntropyLoss": ["weight", "linear.weight", "linear.bias"],
        "PolicyLoss": [],
        "LinearPolicyLoss": ["linear.weight", "linear.bias"],
        "DistillationLoss": [],
        "LinearDistillationLoss": ["linear.weight", "linear.bias"],
        "SparseDistillationLoss": [],
        "LinearSparseDistillationLoss": ["linear.weight", "linear.bias"],
    }
    assert not list(tl.CrossEntropyLoss().state_dict())
    assert list(tl.LinearCrossEntropyLoss(H, V).state_dict()) == ["linear.weight"]
    # As torch's.
    assert list(nn.CrossEntropyLoss(torch.ones(V)).state_dict()) == saved["CrossEntropyLoss"]


@OF_TORCH_2_15
def test_torchs_module_takes_and_gives_the_same() -> None:
    given = {"bias": True, "weight": torch.rand(V), "label_smoothing": 0.1, "ignore_index": None}
    theirs, ours = (
        nn.LinearCrossEntropyLoss(H, V, **given),
        tl.LinearCrossEntropyLoss(H, V, **given),
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    input, target = torch.randn(9, H), torch.randint(0, V, (9,))
    torch.testing.assert_close(ours(input, target), theirs(input, target), rtol=1e-5, atol=0)


def test_modules_show_their_options() -> None:
    shown = {name: repr(module) for name, (module, *_) in modules().items()}
    assert shown["CrossEntropyLoss"] == "CrossEntropyLoss(label_smoothing=0.1)"
    assert "(\n  z_loss=0.001\n" in shown["LinearCrossEntropyLoss"]
    assert f"in_features={H}, out_features={V}, bias=True" in shown["LinearCrossEntropyLoss"]
    assert (
        "(\n  preset='dapo', entropy_coef=0.1, entropy_reduction='as_loss'\n"
        in shown["LinearPolicyLoss"]
    )
    assert shown["PolicyLoss"] == "PolicyLoss(preset='dapo', beta=0.0)"
    assert (
        "label_weight=0.3, divergence_weight=0.7, tail='ignore'\n"
        in shown["LinearSparseDistillationLoss"]
    )


def test_modules_change_type() -> None:
    module = tl.LinearCrossEntropyLoss(H, V, bias=True, dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    hidden, labels = torch.randn(4, H), torch.randint(0, V, (4,))
    module(hidden.bfloat16(), labels).backward()
    assert module.linear.weight.grad.dtype == torch.bfloat16
    module = module.to(torch.float32)
    assert module(hidden, labels).dtype == torch.float32
    weighted = tl.CrossEntropyLoss(torch.rand(V)).to(torch.bfloat16)
    assert weighted.weight.dtype == torch.bfloat16
    assert weighted(torch.randn(4, V), labels).dtype == torch.float32


@pytest.mark.parametrize("option", ["labels_smoothing", "num_items", "token_weights", "mask"])
@pytest.mark.parametrize("name", NAMES)
def test_modules_refuse_what_is_no_option_when_they_are_made(name: str, option: str) -> None:
    arguments: tuple[Any, ...] = (H, V) if "Linear" in name else ()
    with pytest.raises(
        TypeError, match=rf"{name}\.__init__\(\) got an unexpected keyword argument '{option}'"
    ):
        getattr(tl, name)(*arguments, **{option: 1.0})


@pytest.mark.parametrize("name", NAMES)
def test_modules_take_what_changes_at_every_call(name: str) -> None:
    module, inputs, *_ = modules()[name]
    assert not torch.equal(module(*inputs, num_items=3), module(*inputs))
    if "Policy" not in name:
        weights = torch.rand(inputs[0].shape[:-1])
        assert not torch.equal(module(*inputs, token_weights=weights), module(*inputs))


@pytest.mark.parametrize("kind", [tl.LinearCrossEntropyLoss, tl.LinearPolicyLoss])
def test_the_head_is_drawn_as_a_linear_layer(kind: type[nn.Module]) -> None:
    torch.manual_seed(7)
    module = kind(H, V, bias=True)
    torch.manual_seed(7)
    linear = nn.Linear(H, V)
    assert torch.equal(module.linear.weight, linear.weight)
    assert torch.equal(module.linear.bias, linear.bias)
    assert kind(H, V).linear.bias is None
