"""The functions of tileloss.torch on CUDA tensors, on the host or on a GPU: test_torch_cuda.py."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cuda_device
import torch_problems
from cuda_device import OTHER, CudaTensor, get, to_device
from tileloss import torch as tl
from tileloss.integrations.trl import LogProbFunction
from tileloss.torch import _operators, _results
from tileloss.torch import distributed as td
from torch_problems import (
    ALL_FUNCTIONS,
    FUNCTIONS,
    LOGIT_FUNCTIONS,
    B,
    H,
    Problem,
    T,
    V,
    problem,
)

LOSSES = ("cross_entropy", "policy_loss")
ROUNDING = {torch.float32: 4e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_device.installed():
        yield
        tl.check_errors()


def on_device(p: Problem, index: int = 0) -> Problem:
    """Its logits, and what goes with their rows, as leaves of their own."""
    moved = {
        field.name: to_device(x.detach(), index).requires_grad_(x.requires_grad)
        for field in dataclasses.fields(p)
        if (x := getattr(p, field.name)) is not None
    }
    return Problem(**moved)


def hold(found: Tensor, expected: Tensor, relative: float) -> None:
    expected = expected.double()
    least = max(relative * float(expected.abs().nan_to_num().max()) / 10, 1e-7)  # of the largest
    torch.testing.assert_close(
        get(found).double(), expected, rtol=relative, atol=least, equal_nan=True
    )


def hold_function(
    name: str, p: Problem, index: int = 0, allowed: Tensor | None = None, **options: Any
) -> None:
    """The loss and its gradient of CUDA tensors, against the definitions in float64."""
    wide = dataclasses.replace(p, teacher=p.teacher.double())  # definitions compute in its type
    exact = torch_problems.gradients(name, wide, torch_problems.plain, allowed=allowed)
    if allowed is not None:
        options["allowed"] = to_device(allowed, index)
    found = torch_problems.gradients(name, on_device(p, index), **options)
    # A head's products see rounded dlogits, which all but cancel where a target has mass in many columns.
    roundings = 2 if name.startswith("linear_") and name not in FUNCTIONS else 1
    for ours, theirs in zip(found, exact, strict=True):
        assert isinstance(ours, CudaTensor)
        assert ours.device == torch.device("cuda", index)
        hold(ours, theirs, roundings * ROUNDING[ours.dtype])


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    hold_function(name, problem(dtype))


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_the_tokens_of_a_row(name: str) -> None:
    p, is_in = torch_problems.of_sets()
    hold_function(name, p, allowed=tl.allowed_from(is_in))


@pytest.mark.parametrize("name", ["logprobs", "linear_logprobs"])
def test_several_labels(name: str) -> None:
    p = problem()
    labels = torch.stack([p.labels, p.labels.flip(1), p.labels.clamp(min=3)], -1)
    p = dataclasses.replace(p, labels=labels)
    found, exact = (torch_problems.gradients(name, each) for each in (on_device(p), p))
    for ours, theirs in zip(found, exact, strict=True):
        hold(ours, theirs, ROUNDING[torch.float32])


@pytest.mark.parametrize("name", ["logprobs", "linear_logprobs"])
def test_several_labels_among_the_tokens_of_a_row(name: str) -> None:
    """Some are not among them: their logp is -inf."""
    p, is_in = torch_problems.of_sets()
    labels = torch.stack([p.labels, p.labels.flip(1), p.labels.clamp(min=3)], -1)
    p, words = dataclasses.replace(p, labels=labels), tl.allowed_from(is_in)

    def found(q: Problem, allowed: Tensor) -> tuple[Tensor, ...]:
        leaves = q.leaves(name)
        options = {"linear_bias": leaves[2]} if "linear" in name else {}
        rows = getattr(tl, name)(*leaves[:2], q.labels, allowed=allowed, **options)
        logp = rows.logp.detach().nan_to_num(neginf=1)
        return logp, *torch.autograd.grad(rows.logp.sum(), leaves)

    exact = found(p, words)
    assert (exact[0] == 1).any()
    for ours, theirs in zip(found(on_device(p), to_device(words)), exact, strict=True):
        hold(ours, theirs, ROUNDING[torch.float32])


@pytest.mark.parametrize("name", [name for name in ALL_FUNCTIONS if name.startswith("linear")])
def test_a_low_rank_part(name: str) -> None:
    """Of each type; a frozen head too."""
    for dtype in ROUNDING:
        p, part = problem(dtype), [torch.randn(*of, 6, dtype=dtype) for of in ((B, T), (V,))]
        found, exact = [], []
        for each, to, into in (on_device(p), to_device, found), (p, lambda x: x, exact):
            leaves = (*each.leaves(name), *(to(x).requires_grad_() for x in part))
            for asked in leaves, (leaves[0], *leaves[3:]):
                loss = torch_problems.run(name, each, *leaves[:3], low_rank=leaves[3:])
                into += loss.detach(), *torch.autograd.grad(loss, asked)
        for ours, theirs in zip(found, exact, strict=True):
            hold(ours, theirs, 2 * ROUNDING[dtype])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", ["grad_in_forward", "inplace_backward"])
def test_other_ways_to_the_gradient(name: str, mode: str) -> None:
    p = problem()
    hold_function(name, p, **{mode: True})
    leaf = on_device(p)
    # The factor is not looked at on the host; a graph that is kept gives nothing of its own away.
    loss = 3 * torch_problems.run(name, leaf, leaf.logits, grad_in_forward=True)
    exact = torch_problems.gradients(name, p, torch_problems.plain)[1]
    (first,) = torch.autograd.grad(loss, [leaf.logits], retain_graph=True)
    first.zero_()
    hold(torch.autograd.grad(loss, [leaf.logits])[0], 3 * exact, ROUNDING[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in ALL_FUNCTIONS if "linear" in name])
def test_a_heads_gradient_is_added_to_a_float32_tensor(name: str, dtype: torch.dtype) -> None:
    """Twice what autograd gets, but for autograd's own rounding, on top of what is there."""
    q, head_grad = on_device(problem(dtype)), to_device(torch.ones(V, H))
    leaves, mode = q.leaves(name), {} if "logprobs" in name else {"grad_in_forward": False}
    expected = torch.autograd.grad(3 * torch_problems.run(name, q, *leaves, **mode), leaves)
    for _ in range(2):
        loss = torch_problems.run(name, q, *leaves, linear_weight_grad=head_grad)
        (3 * loss).backward()
    hold(to_device(get(head_grad) - 1), 2 * get(expected[1]), ROUNDING[dtype])
    hold(q.hidden.grad, 2 * get(expected[0]), ROUNDING[dtype])
    hold(q.bias.grad, 2 * get(expected[2]), ROUNDING[dtype])
    assert q.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_is_not_rounded_to_the_gradients_type(dtype: torch.dtype) -> None:
    q = on_device(problem(dtype))
    loss = tl.cross_entropy(q.logits, q.labels, grad_in_forward=True)
    factor = torch.tensor(1 / 3 if dtype == torch.bfloat16 else 1e5)  # beyond float16

    def gradient(upstream: Tensor, keep: bool) -> Tensor:
        leaf = torch.autograd.grad(loss, [q.logits], to_device(upstream), retain_graph=keep)
        return get(leaf[0])

    expected = (gradient(torch.tensor(1.0), True).float() * factor).to(dtype)
    assert torch.equal(gradient(factor, True), expected)
    assert torch.equal(gradient(factor, False), expected)


# How often the forward and the backward read the logits, and write the gradient; and their kernels and fills.
ONE_PASS, TWO_PASSES = ((1, 1), (0, 0)), ((1, 0), (1, 1))
PASSES: list[tuple[str, torch.dtype, dict[str, Any], Any, tuple[int, int]]] = [
    ("cross_entropy", torch.float32, {}, ONE_PASS, (5, 1)),
    ("cross_entropy", torch.bfloat16, {}, ONE_PASS, (5, 1)),
    ("policy_loss", torch.bfloat16, {}, ONE_PASS, (7, 1)),
    ("cross_entropy", torch.float16, {}, TWO_PASSES, (6, 5)),  # AMP's scale comes later
    ("cross_entropy", torch.float16, {"grad_in_forward": True}, ONE_PASS, (5, 1)),
    ("cross_entropy", torch.bfloat16, {"grad_in_forward": False}, TWO_PASSES, (6, 5)),
    ("cross_entropy", torch.bfloat16, {"inplace_backward": True}, TWO_PASSES, (6, 5)),
    ("cross_entropy", torch.bfloat16, {"reduction": "none"}, TWO_PASSES, (5, 4)),
    ("policy_loss", torch.bfloat16, {"aggregation": "none"}, TWO_PASSES, (8, 7)),
]


@pytest.mark.parametrize(("name", "dtype", "options", "passes", "launches"), PASSES)
def test_how_often_logits_are_read_and_gradients_written(
    name: str, dtype: torch.dtype, options: dict[str, Any], passes: Any, launches: tuple[int, int]
) -> None:
    q, rows = on_device(problem(dtype)), B * T
    used, size = int((get(q.labels) != -100).sum()), q.logits.element_size()
    logits = q.logits * 1  # no leaf, so that its memory may be written over
    with cuda_device.Traffic() as forward:
        loss = torch_problems.run(name, q, logits, **options)
    with cuda_device.Traffic() as backward:
        torch.autograd.grad(loss, [logits], torch.ones_like(loss))
    for traffic, (reads, writes), queued in zip((forward, backward), passes, launches, strict=True):
        if traffic.counts:  # and the label's own each time
            assert traffic.loaded == reads * used * (V + 1) * size
            assert traffic.stored == writes * (rows * V + used) * size
            assert not {"mul", "mul_", "clone"} & {*traffic.operators}
            assert traffic.queued == queued


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("cross_entropy", {}),
        ("cross_entropy", {"inplace_backward": True}),  # over a part of longer logits
        ("linear_cross_entropy", {}),
    ],
)
def test_a_finished_gradient_is_left_alone_where_the_factor_is_one(
    name: str, mode: dict[str, Any]
) -> None:
    """Else it is read and written once, in place."""
    q = on_device(problem(torch.bfloat16))
    leaves = q.leaves(name)
    expected = torch_problems.gradients(name, q, grad_in_forward=True)[1:]
    for factor in (1.0, 0.25):
        inputs = [torch.cat([x, x], 1)[:, :T] if mode else x for x in leaves]
        loss = torch_problems.run(name, q, *inputs, grad_in_forward=True, **mode)
        upstream = to_device(torch.tensor(factor))
        with cuda_device.Traffic() as traffic:
            loss.backward(upstream, inputs=[*leaves])
        for x, exact in zip(leaves, expected, strict=True):
            assert x.grad is not None
            assert torch.equal(get(x.grad), get(exact) * factor)
            x.grad = None
        if traffic.counts:
            size = 0 if factor == 1 else sum(x.numel() * x.element_size() for x in leaves)
            assert (traffic.loaded, traffic.stored) == (size, size)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_policy_loss"])
def test_a_call_keeps_nothing_alive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory goes back to torch when the last reference does, not when Python looks for cycles."""
    q, made, own = on_device(problem()), [], torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        x = own(*args, **kwargs)
        made.append(weakref.ref(x))
        return x

    monkeypatch.setattr(torch, "empty", empty)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # torch keeps a gradient of the first backward
            made.clear()
            torch_problems.gradients(name, q)
        assert made
        # On a GPU another thread runs the backward, and may hold its last task for a moment.
        end = time.monotonic() + cuda_device.BACKWARD_ENDS
        while any(x() is not None for x in made) and time.monotonic() < end:
            time.sleep(0.001)
        assert not [x().shape for x in made if x() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", LOGIT_FUNCTIONS)
def test_the_second_device(name: str) -> None:
    hold_function(name, problem(), index=OTHER)


def views(x: Tensor) -> dict[str, Tensor]:
    """The same rows, lying in other ways."""
    wide = torch.cat([x, x[:, :1]], 1)
    return {
        "groups of rows": wide[:, :-1],
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "columns apart": torch.stack([x, x], -1)[..., 0],
        "an odd start": torch.cat([x[0, 0, :1], x.flatten()])[1:].view(x.shape),
    }


def test_any_strides() -> None:
    p = problem()
    leaf = on_device(p)
    expected = tl.cross_entropy(p.logits, p.labels)
    for how, x in views(leaf.logits.detach()).items():
        y = views(leaf.labels[..., None])[how][..., 0]
        hold(tl.cross_entropy(x, y), expected.detach(), 1e-6)


def test_numbers_may_lie_on_the_device_and_elsewhere() -> None:
    p = problem()
    expected = tl.cross_entropy(p.logits, p.labels, temperature=0.5, num_items=8.0).detach()
    x, y = on_device(p).logits, on_device(p).labels
    for number in (
        0.5,
        torch.tensor(0.5),
        to_device(torch.tensor([0.5])),
        to_device(torch.tensor(0.5).double(), OTHER),
    ):
        count = to_device(torch.tensor(8))
        hold(tl.cross_entropy(x, y, temperature=number, num_items=count), expected, 1e-6)


def test_sequences_and_metrics() -> None:
    p = problem()
    names = {"kind": "cispo", "aggregation": "seq_mean_token_mean", "epsilon_high": 5.0}
    expected, numbers = tl.policy_loss(p.logits, p.labels, p.advantages, return_metrics=True)
    q = on_device(p)
    found, metrics = tl.policy_loss(q.logits, q.labels, q.advantages, return_metrics=True)
    hold(found, expected.detach(), 1e-5)
    assert metrics.keys() == numbers.keys()
    for name, number in numbers.items():
        hold(metrics[name], number, 1e-4)
    offsets = torch.tensor([0, T, 3 * T])
    flat = (p.logits.flatten(0, 1), p.labels.flatten(), p.advantages[:2])
    of_offsets = (q.logits.flatten(0, 1), q.labels.flatten(), q.advantages[:2])
    expected = tl.policy_loss(*flat, sequence_offsets=offsets, **names)
    hold(
        tl.policy_loss(*of_offsets, sequence_offsets=to_device(offsets), **names),
        expected.detach(),
        1e-5,
    )
    nothing = (
        to_device(torch.zeros(2, 0, V)),
        to_device(torch.zeros(2, 0).long()),
        to_device(torch.ones(2)),
    )
    expected = tl.policy_loss(torch.zeros(2, 0, V), torch.zeros(2, 0).long(), torch.ones(2))
    hold(tl.policy_loss(*nothing), expected, 0.0)


def test_row_outputs() -> None:
    p = problem()
    p.logits.data[1, 1, 3] = float("nan")
    names = ("logp", "lse", "entropy", "argmax", "correct", "log_sum_sq_probs", "mean_logit")
    q = on_device(p)
    found = tl.logprobs(q.logits, q.labels, outputs=names)
    for ours, theirs in zip(found, tl.logprobs(p.logits, p.labels, outputs=names), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(get(ours), theirs.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_modules() -> None:
    p = problem()
    q = on_device(p)
    for module, names in {
        tl.CrossEntropyLoss(label_smoothing=0.1): ("logits", "labels"),
        tl.LinearCrossEntropyLoss(H, V, softcap=9.0): ("hidden", "labels"),
        tl.PolicyLoss(preset="gspo"): ("logits", "labels", "advantages"),
        tl.DistillationLoss(divergence="jsd"): ("logits", "teacher", "labels"),
    }.items():
        expected = module(*(getattr(p, name) for name in names)).detach()
        cuda_device.move(module)
        hold(module(*(getattr(q, name) for name in names)), expected, 1e-5)


def test_autocast_says_in_what_a_head_is_multiplied() -> None:
    q = on_device(problem())
    given = q.hidden.detach(), q.weight.detach(), q.labels
    expected = tl.linear_cross_entropy(*given, compute_dtype=torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses where there is no GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        found = tl.linear_cross_entropy(*given)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert get(found) == get(expected) != get(tl.linear_cross_entropy(*given))


def test_trls_fused_head() -> None:
    p = problem()
    q = on_device(p)

    def rows(p: Problem) -> tuple[Tensor | None, ...]:
        tensors = (p.hidden.flatten(0, 1), p.weight, p.bias, p.labels.flatten().clamp(min=0))
        return LogProbFunction.apply(*tensors, 0.7, 64, 30.0)

    with torch.no_grad():
        for ours, theirs in zip(rows(q), rows(p), strict=True):
            assert ours is not None
            assert theirs is not None
            hold(ours, theirs, ROUNDING[torch.float32])


def test_what_the_device_finds_wrong_is_nan_and_can_be_asked_for() -> None:
    q = on_device(problem())
    labels = to_device(torch.tensor([0, V, -100]))
    loss = tl.cross_entropy(q.logits[0, :3].detach(), labels, reduction="none")
    assert get(loss).isnan().tolist() == [False, True, False]
    with pytest.raises(IndexError, match=r"^target\[1\]: expected 0 <= label < 67 .*, got 67"):
        tl.check_errors("cuda:0")
    tl.check_errors(0)
    for device in ("cuda", torch.device("cuda", OTHER), "cpu", None):
        tl.check_errors(device)
    wrong = to_device(torch.tensor(-1.0))
    tl.cross_entropy(q.logits.detach(), q.labels, temperature=wrong)
    with pytest.raises(ValueError, match="^temperature: expected a number > 0, got -1"):
        tl.check_errors()


def test_tensors_on_two_devices_are_refused() -> None:
    p, q = problem(), on_device(problem())
    there = to_device(p.labels, OTHER)
    for labels, where in ((p.labels, "cpu"), (there, "cuda:1"))[: 1 + OTHER]:
        words = f"^target: expected a tensor on cuda:0, where input is, got one on {where}$"
        with pytest.raises(ValueError, match=words):
            tl.cross_entropy(q.logits, labels)
    with pytest.raises(
        ValueError, match="^target: expected a tensor on cpu, where input is, got one on cuda:0$"
    ):
        tl.cross_entropy(p.logits, q.labels)
    words = "^weight: expected a tensor on cuda:0, where input is, got one on cpu$"
    with pytest.raises(ValueError, match=words):
        tl.cross_entropy(q.logits, q.labels, weight=torch.ones(V))
    words = "^linear_weight: expected a tensor on cuda:0, where input is, got one on cpu$"
    with pytest.raises(ValueError, match=words):
        tl.linear_cross_entropy(q.hidden, p.weight, q.labels)


@pytest.mark.parametrize("name", LOGIT_FUNCTIONS)
def test_what_is_registered_with_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators, as a program of torch.compile calls them."""
    monkeypatch.setattr(_operators, "_PLAIN", frozenset[type]())
    monkeypatch.setattr(_results, "facts", lambda values: None)
    hold_function(name, problem())


def test_the_workspace_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a call needs it that is captured in a graph."""
    q, made, own = on_device(problem()), [], torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made.append(own(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    tl.cross_entropy(q.logits.detach(), q.labels)
    assert [x.numel() > 0 and x.device.index == 0 for x in made if x.dtype == torch.uint8] == [True]


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_a_graph_captures_loss_and_gradient(name: str) -> None:
    """After a call outside of it. It waits for nothing and reads nothing; a replay sees what the tensors hold then."""
    p, other = problem(), problem()
    q = on_device(p)
    torch_problems.gradients(name, q)
    graph = cuda_device.Graph()
    with graph.capture():
        found = torch_problems.gradients(name, q)
    for now in (p, other, p):
        for field in dataclasses.fields(p):
            mine = getattr(q, field.name).detach()
            mine.copy_(to_device(getattr(now, field.name).detach()))
        graph.replay()
        # A target that is made of the teacher is the student's constant.
        exact = torch_problems.gradients(name, now, torch_problems.plain)
        for ours, theirs in zip(found, exact, strict=True):
            hold(ours, theirs, 2 * ROUNDING[torch.float32])


@pytest.mark.skipif(cuda_device.BACKEND == "gloo", reason="NOT RUN: compiled for a GPU alone")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step(mode: str) -> None:
    """Inductor's kernels beside the library's; the second way they are all replayed as a graph."""
    p, step = problem(), torch.compile(compiled_step, mode=mode, fullgraph=True)
    exact = [x.detach().double().requires_grad_() for x in (p.hidden, p.weight)]
    compiled_step(*exact, p.labels, torch_problems.definitions.cross_entropy).backward()
    for _ in range(4):  # runs, is recorded, is replayed
        q = on_device(p)
        step(q.hidden, q.weight, q.labels).backward()
        for ours, theirs in zip((q.hidden, q.weight), exact, strict=True):
            hold(ours.grad, theirs.grad, 2 * ROUNDING[torch.float32])


def compiled_step(
    hidden: Tensor, weight: Tensor, labels: Tensor, cross_entropy: Any = tl.cross_entropy
) -> Tensor:
    return 2 * cross_entropy(torch.tanh(hidden @ weight.T), labels)


def test_a_graph_captures_no_number_of_the_cpu() -> None:
    """Its replays would not see what the tensor holds then."""
    q, number = on_device(problem()), torch.tensor(0.5)
    graph = cuda_device.Graph()
    with graph.capture():
        for name in ("temperature", "num_items"):
            words = f"^{name}: expected a number or a tensor on cuda:0, as a CUDA graph is being captured, got a tensor on cpu$"
            with pytest.raises(ValueError, match=words):
                tl.cross_entropy(q.logits.detach(), q.labels, **{name: number})
        found = tl.cross_entropy(q.logits.detach(), q.labels, temperature=0.5)
    graph.replay()
    expected = tl.cross_entropy(q.logits.detach(), q.labels, temperature=number)
    assert torch.equal(get(found), get(expected))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group(cuda_device.BACKEND, init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_vocabulary_over_a_group(name: str, group: None) -> None:
    """Of one process, whose slices of the vocabulary are swept one by one."""
    p = problem()
    columns = 64  # as many in each slice
    p = dataclasses.replace(
        p,
        logits=p.logits[..., :columns].detach().requires_grad_(),
        weight=p.weight[:columns].detach().requires_grad_(),
        bias=p.bias[:columns].detach().requires_grad_(),
        labels=p.labels.clamp(max=columns - 1),
    )
    q = on_device(p)
    exact = torch_problems.gradients(name, p, torch_problems.plain)
    with cuda_device.reads():  # that is how ranks meet
        found = torch_problems.gradients(name, q, partial(torch_problems.run, of=td))
    for ours, theirs in zip(found, exact, strict=True):
        hold(ours, theirs, ROUNDING[torch.float32])
