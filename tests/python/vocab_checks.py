"""Checks that every rank of vocab_ranks.py makes: definitions, DTensors, errors on all ranks at once, what travels, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import checks
from tileloss import torch as tl
from tileloss.torch import distributed as td
from tileloss.torch.distributed import _fused, _states, adapters
from tileloss.torch.distributed._request import Request
from vocab_cut import Whole, bounds, cut

N, V, H = 13, 64, 5


def problem(*, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, logits (leaves) and labels."""
    torch.manual_seed(3)
    leaves = [torch.randn(N, H), torch.randn(V, H), 2 * torch.randn(N, V)]
    labels = torch.randint(0, V, (N,))
    labels[4] = -100
    hidden, head, logits = (x.requires_grad_(requires_grad) for x in leaves)
    return hidden, head, logits, labels


def mine(x: Tensor) -> Tensor:
    begin, end = bounds(x.shape[0])
    return x[begin:end]


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def against_the_definitions() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cross_entropy", "logprobs", "policy_loss"):
            patch.setattr(checks.tl, name, Whole(name))
        for dtype in (torch.float32, torch.bfloat16):
            *_, x, labels = problem()
            logits = x.detach().to(dtype)
            upstream = {name: torch.rand(N) + 0.5 for name in ("logp", "lse", "entropy")}
            for name, options in (
                ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-3}),
                ("cross_entropy", {"reduction": "sum", "softcap": 20.0, "temperature": 0.7}),
                ("logprobs", {"outputs": tuple(upstream), "upstream": upstream}),
            ):
                checks.check(name, checks.leaf(logits), labels, **options)
        given = {"preset": "gspo", "beta": 0.1, "old_logp": torch.randn(2, 6) - 4}
        tokens, labels = 2 * torch.randn(2, 6, V), torch.randint(0, V, (2, 6))
        checks.check(
            "policy_loss", checks.leaf(tokens), labels, torch.tensor([1.0, -0.5]),
            ref_logp=torch.randn(2, 6) - 4, **given,
        )  # fmt: skip


def in_place() -> None:
    *_, x, labels = problem(requires_grad=False)
    shard = cut(x, -1).contiguous().requires_grad_()
    values, leaf = shard.detach().clone(), shard.detach().clone().requires_grad_()
    td.cross_entropy(leaf, labels).backward()
    logits = values.clone()
    view = logits.requires_grad_() * 1
    td.cross_entropy(view, labels, inplace_backward=True).backward()
    assert leaf.grad is not None and logits.grad is not None
    assert torch.equal(logits.grad, leaf.grad)
    assert torch.equal(view, leaf.grad)  # it lies where the logits were


def backward_twice() -> None:
    hidden, head, _, labels = problem()
    for in_forward in (True, False):
        loss = td.linear_cross_entropy(hidden, mine(head), labels, grad_in_forward=in_forward)
        (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        (second,) = torch.autograd.grad(3 * loss, hidden, retain_graph=True)
        torch.testing.assert_close(second, 3 * first)
        gradients = torch.autograd.grad(loss, (hidden, head), create_graph=True)
        for again in gradients:
            for x in (hidden, head):
                with pytest.raises(RuntimeError, match="double backward is not supported"):
                    torch.autograd.grad(again.sum(), x, retain_graph=True, allow_unused=True)


def added_head_gradients() -> None:
    """Each rank's float32 sums over two backwards, beside the gradients that autograd has."""
    torch.manual_seed(4)
    bias, adapter = torch.randn(V), (torch.randn(N, 3), torch.randn(V, 3))
    teacher = torch.randn(V, H)
    for name, target in (("linear_cross_entropy", ()), ("linear_distillation", (0, mine(teacher)))):
        found = []
        for adds in (False, True):
            hidden, head, _, labels = problem()
            weight, own_bias = (mine(x.detach()).clone().requires_grad_() for x in (head, bias))
            x, b = adapter[0].clone().requires_grad_(), mine(adapter[1]).clone().requires_grad_()
            buffer = torch.full_like(weight, 0.5, requires_grad=False)
            target = (hidden.detach(), *target[1:]) if target else ()
            more = (
                {"linear_weight_grad": buffer}
                if adds
                else {"grad_in_forward": False}
                if not target
                else {}
            )
            for factor in (1.0, 0.25):
                loss = getattr(td, name)(
                    hidden, weight, *target, labels, linear_bias=own_bias, low_rank=(x, b), **more
                )
                (factor * loss).backward()
            assert (weight.grad is None) == adds
            of_head = buffer - 0.5 if adds else weight.grad
            found.append((of_head, hidden.grad, own_bias.grad, x.grad, b.grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match="grad_in_forward: expected None or False with linear_weight_grad"
    ):
        td.linear_cross_entropy(
            hidden, weight, labels, linear_weight_grad=buffer, grad_in_forward=True
        )


def nothing_in_use() -> None:
    """No rows, or none that count: losses and gradients are 0, and no rank waits."""
    for rows in (0, 3):
        labels = torch.full((rows,), -100)
        for in_forward in (True, False):
            hidden = torch.randn(rows, H).requires_grad_()
            weight = mine(torch.randn(V, H)).clone().requires_grad_()
            loss = td.linear_cross_entropy(hidden, weight, labels, grad_in_forward=in_forward)
            loss.backward()
            for x in (loss, hidden.grad, weight.grad):
                assert torch.equal(x, torch.zeros_like(x)), (rows, in_forward)
        logits = torch.randn(rows, V // dist.get_world_size()).requires_grad_()
        td.cross_entropy(logits, labels).backward()
        assert torch.equal(logits.grad, torch.zeros_like(logits))


def no_labels_a_row() -> None:
    hidden, head, x, labels = problem()
    none = labels[:, None][:, :0]
    for rows in (
        td.logprobs(cut(x, -1), none, outputs=("logp", "lse")),
        td.linear_logprobs(hidden, mine(head), none, outputs=("logp", "lse")),
    ):
        assert rows.logp is not None and rows.lse is not None
        assert rows.logp.shape == (N, 0)
        assert not rows.lse.any()


def check_dtensors() -> None:
    """Shard(0) of a head whose rows do not divide by the ranks, Shard(-1) of logits, replicated hidden states and labels."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, head, logits, labels = problem()
    head = head.detach()[:61].requires_grad_()
    labels = labels.clamp(max=60)
    expected = tl.linear_cross_entropy(hidden, head, labels)
    expected.backward()
    w = distribute_tensor(head.detach(), mesh, [Shard(0)]).requires_grad_()
    h = distribute_tensor(hidden.detach(), mesh, [Replicate()]).requires_grad_()
    loss = td.linear_cross_entropy(h, w, distribute_tensor(labels, mesh, [Replicate()]))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert isinstance(w.grad, DTensor) and isinstance(h.grad, DTensor)
    assert w.grad.placements == w.placements
    torch.testing.assert_close(w.grad.full_tensor(), head.grad, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(h.grad.to_local(), hidden.grad, rtol=2e-5, atol=1e-6)
    x = distribute_tensor(logits.detach(), mesh, [Shard(1)])
    found = td.logprobs(x, labels, group=mesh.get_group(), outputs=("argmax",))
    assert torch.equal(found.argmax, torch.where(labels == -100, -1, logits.argmax(-1)))
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match=r"input: expected .* DTensor with Shard\(1\).*to_loc"):
            td.logprobs(distribute_tensor(logits.detach(), mesh, [Replicate()]), labels)


def a_group_of_some() -> None:
    """Ranks by twos: each pair has a vocabulary of its own."""
    count = dist.get_world_size()
    if count < 4:
        return
    pairs = [dist.new_group([first, first + 1]) for first in range(0, count, 2)]
    group = pairs[dist.get_rank() // 2]
    *_, x, labels = problem()
    half = x.chunk(2, -1)[dist.get_rank(group)]
    expected = tl.cross_entropy(x, labels)
    torch.testing.assert_close(td.cross_entropy(half, labels, group=group), expected)
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="group: expected a group that this process belongs"):
            td.cross_entropy(half, labels, group=pairs[0])


def given_starts() -> None:
    """Shards in the ranks' reverse order."""
    count = dist.get_world_size()
    place = count - 1 - dist.get_rank()
    *_, x, labels = problem()
    shard, start = x.chunk(count, -1)[place], place * (V // count)
    loss = td.cross_entropy(shard, labels, vocab_start=start)
    torch.testing.assert_close(loss, tl.cross_entropy(x, labels))
    if count > 1:
        with pytest.raises(ValueError, match="vocab_start: expected shards side by side"):
            td.cross_entropy(shard, labels, vocab_start=start + (place == 1))
        with pytest.raises(ValueError, match="vocab_start: expected on every rank .* or on none"):
            td.cross_entropy(shard, labels, vocab_start=start if place == 1 else None)


def raises(kind: Any, message: str, call: Any) -> None:
    with pytest.raises(kind, match=message):
        call()


def refusals() -> None:
    hidden, head, x, labels = problem(requires_grad=False)
    shard, rows = cut(x, -1), mine(head)
    raises(
        IndexError,
        r"target\[0\]: expected 0 <= label < 64",
        lambda: td.cross_entropy(shard, labels * 0 + 64),
    )
    bad = torch.full_like(labels, 64)
    raises(IndexError, "target", lambda: td.linear_logprobs(hidden, rows, bad))
    pairs = torch.stack([labels, labels * 0 + 64], -1)
    raises(
        IndexError, r"target\[0,1\]: expected 0 <= label < 64", lambda: td.logprobs(shard, pairs)
    )
    raises(ValueError, "correct: expected none with several labels a row",
           lambda: td.logprobs(shard, pairs % 64, outputs=("correct",)))  # fmt: skip
    raises(ValueError, r"target: expected the leading shape of input, \[13\], got \[13, 2\]",
           lambda: td.cross_entropy(shard, pairs))  # fmt: skip
    raises(
        TypeError, "unexpected keyword argument", lambda: td.cross_entropy(shard, labels, speed=9)
    )
    raises(ValueError, "valid_vocab: expected 1 to 64, .* got 65",
           lambda: td.cross_entropy(shard, labels, valid_vocab=65))  # fmt: skip
    raises(ValueError, r"weight: expected \[64\]",
           lambda: td.cross_entropy(shard, labels, torch.ones(63)))  # fmt: skip
    raises(ValueError, "workspace_bytes",
           lambda: td.linear_cross_entropy(hidden, rows, labels, workspace_bytes=100))  # fmt: skip
    words = torch.ones(-(-shard.shape[-1] // 32), dtype=torch.int32)
    if shard.shape[-1] % 32:
        raises(ValueError, "vocab_start: expected multiples of 32 with allowed, got",
               lambda: td.cross_entropy(shard, labels, allowed=words))  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"torch\.compile"):
        torch.jit.trace(lambda x: td.cross_entropy(x, labels), shard)


def one_rank_is_different() -> None:
    """What one rank does wrong all ranks learn, at once and before anything runs."""
    if dist.get_world_size() == 1:
        return
    hidden, head, x, labels = problem(requires_grad=False)
    shard, rows, one = cut(x, -1), mine(head), is_last()
    short = slice(0, N - 1) if one else slice(None)
    raises(ValueError, "input: expected the same number of rows",
           lambda: td.cross_entropy(shard[short], labels[short]))  # fmt: skip
    raises(ValueError, "input: expected one dtype",
           lambda: td.cross_entropy(shard.bfloat16() if one else shard, labels))  # fmt: skip
    last = dist.get_world_size() - 1
    alike = "expected the same on every rank of the group, got"
    raises(ValueError, rf"target\[3\]: {alike} {labels[3]} on rank 0 and {(labels[3] + 1) % V} on rank {last}",
           lambda: td.cross_entropy(shard, labels.index_fill(0, torch.tensor([3]), (labels[3] + one) % V)))  # fmt: skip
    pairs = torch.stack([labels, labels.roll(1)], -1)
    changed = pairs.index_put((torch.tensor(3), torch.tensor(1)), (pairs[3, 1] + one) % V)
    raises(ValueError, rf"target\[3,1\]: {alike} {pairs[3, 1]} on rank 0 and {(pairs[3, 1] + 1) % V} on rank {last}",
           lambda: td.logprobs(shard, changed))  # fmt: skip
    raises(ValueError, rf"temperature: {alike} the default on rank 0 and 2.0 on rank {last}",
           lambda: td.cross_entropy(shard, labels, temperature=1.0 + one))  # fmt: skip
    raises(ValueError, rf"reduction: {alike} sum on rank 0 and none on rank {last}",
           lambda: td.cross_entropy(shard, labels, reduction="none" if one else "sum"))  # fmt: skip
    raises(ValueError, rf"divergence: {alike} the default on rank 0 and jsd on rank {last}",
           lambda: td.distillation(shard, shard, divergence="jsd" if one else "forward_kl"))  # fmt: skip
    raises(ValueError, rf"return_metrics: {alike} False on rank 0 and True on rank {last}",
           lambda: td.policy_loss(shard[None], labels[None], torch.ones(1), return_metrics=one))  # fmt: skip
    raises(ValueError, rf"token_weights: {alike} torch.float32 \[13\] of checksum .* on rank {last}",
           lambda: td.cross_entropy(shard, labels, token_weights=torch.ones(N) + one))  # fmt: skip
    raises(ValueError, rf"token_weights: {alike} None on rank 0 and torch.float32",
           lambda: td.cross_entropy(shard, labels, token_weights=torch.ones(N) if one else None))  # fmt: skip
    weight, buffer = rows.clone().requires_grad_(), torch.zeros_like(rows)
    raises(ValueError, rf"linear_weight_grad is given: {alike} False on rank 0 and True on rank {last}",
           lambda: td.linear_logprobs(hidden, weight, labels, linear_weight_grad=buffer if one else None))  # fmt: skip
    pair = hidden[:, :2], rows[:, :2]
    raises(ValueError, rf"low_rank: {alike} R = 2 of .* on rank 0 and R = 1 of",
           lambda: td.linear_logprobs(hidden, rows, labels, low_rank=[x[:, : 2 - one] for x in pair]))  # fmt: skip
    raises(ValueError, rf"low_rank: {alike} None on rank 0 and R = 2",
           lambda: td.linear_logprobs(hidden, rows, labels, low_rank=pair if one else None))  # fmt: skip
    trained = pair[0], pair[1].detach().requires_grad_(bool(one))
    raises(ValueError, rf"requires_grad of low_rank\[1\]: {alike} False on rank 0 and True",
           lambda: td.linear_logprobs(hidden, rows, labels, low_rank=trained))  # fmt: skip
    raises(ValueError, "linear_bias: expected a bias, or none",
           lambda: td.linear_cross_entropy(hidden, rows, labels, linear_bias=rows[:, 0] if one else None))  # fmt: skip
    raises(ValueError, "input: expected the same requires_grad",
           lambda: td.linear_cross_entropy(hidden.clone().requires_grad_(one), rows, labels))  # fmt: skip
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    other = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
    megatron = adapters.vocab_parallel_cross_entropy
    for kind, message, call in (
        (TypeError, "input: expected a Tensor", lambda: td.cross_entropy("x" if one else shard, labels)),
        (TypeError, "target: expected a Tensor", lambda: td.cross_entropy(shard, labels.tolist() if one else labels)),
        (ValueError, r"input: expected a plain tensor, or a DTensor", lambda: td.cross_entropy(other if one else shard, labels)),
        (ValueError, "outputs: expected a tuple of names", lambda: td.logprobs(shard, labels, outputs=5 if one else ("logp",))),
        (ValueError, "outputs: expected a tuple of names", lambda: td.distillation(shard, shard, outputs=5 if one else ("lse",))),
        (ValueError, "teacher: expected input's shape", lambda: td.distillation(shard, shard[:3] if one else shard)),
        (ValueError, "target: expected labels of an integer", lambda: td.cross_entropy(shard, shard[:3] if one else shard)),
        (ValueError, "vocab_start: expected an", lambda: td.cross_entropy(shard, labels, vocab_start=2**70 if one else None)),
        (TypeError, "vocab_parallel_logits: expected", lambda: megatron("x" if one else shard, labels, 0.1)),
    ):  # fmt: skip
        others = f"got an error on rank {last}: {kind.__name__}: {message}"
        raises(kind if one else RuntimeError, message if one else others, call)


def failures_after_the_meeting() -> None:
    """What fails on one rank in a backward all ranks learn where they would wait for its share of the hidden states' gradient."""
    hidden, head, _, labels = problem()
    rows, one = mine(head), is_last()

    def fails(*_: Any) -> None:
        raise MemoryError("no more")

    kind, message = (
        (MemoryError, "no more") if one else (RuntimeError, "on rank .: MemoryError: no")
    )
    loss = td.linear_cross_entropy(hidden, rows, labels, grad_in_forward=False)
    with pytest.MonkeyPatch.context() as patch:
        if one:
            patch.setattr(Request, "backward", fails)
            patch.setattr(_fused, "results_of", fails)
        raises(kind, message, lambda: torch.autograd.grad(loss, hidden))
        raises(kind, message, lambda: td.linear_cross_entropy(hidden, rows, labels))
        if one:
            patch.setattr(_states.Met, "set", fails)
        raises(
            kind,
            message,
            lambda: td.linear_distillation(hidden, rows, hidden.detach(), rows.detach()),
        )


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank gives to collectives, and how many those are."""
    found = {"bytes": 0, "calls": 0}
    with pytest.MonkeyPatch.context() as patch:

        def wrap(name: str, given: int) -> None:
            own = getattr(dist, name)

            def counting(*args: Any, **kwargs: Any) -> Any:
                found["bytes"] += args[given].nbytes
                found["calls"] += 1
                return own(*args, **kwargs)

            patch.setattr(dist, name, counting)

        wrap("all_gather", 1)
        wrap("all_reduce", 0)
        yield found


def what_travels() -> None:
    """Facts, states of the slices, dhidden: whatever the vocabulary's size."""
    count = dist.get_world_size()
    slices = 8 // count
    for vocab in (64, 4096):
        torch.manual_seed(0)
        hidden, head = torch.randn(N, H, requires_grad=True), torch.randn(vocab, H)
        labels = torch.randint(0, vocab, (N,))
        facts, states, dhidden = 12 * 8, (slices * 3 * N + 1) * 4, (N * H + count) * 4
        for in_forward in (True, False):
            weight = mine(head).clone().requires_grad_()
            with counted() as found:
                td.linear_cross_entropy(
                    hidden, weight, labels, grad_in_forward=in_forward
                ).backward()
            sent = dhidden if count > 1 else 0
            assert found == {"bytes": facts + states + sent, "calls": 2 + (count > 1)}, found
        logits = (hidden @ mine(head).T).detach().requires_grad_()
        with counted() as found:
            td.cross_entropy(logits, labels).backward()
        assert found == {"bytes": facts + states, "calls": 2}, found


def liger() -> None:
    hidden, head, _, labels = problem()
    w = mine(head.detach()).requires_grad_()
    call = adapters.LigerFusedLinearScaledCrossEntropyTPFunction.apply
    nll, entropy = call(hidden, w, labels, None, 0.7, -100, 1, True)
    (nll.sum() + 0.3 * entropy.sum()).backward()
    ours = hidden.grad
    hidden.grad = None
    logits = hidden.double() @ head.double().T / 0.7
    logp = torch.log_softmax(logits, -1)
    used = labels != -100
    exact = F.cross_entropy(logits, labels, reduction="none")
    of_entropy = -(logp.exp() * logp).sum(-1) * used
    (exact.sum() + 0.3 * of_entropy.sum()).backward()
    for found, wanted in (
        (nll, exact), (entropy, of_entropy), (ours, hidden.grad), (w.grad, mine(head.grad)),
    ):  # fmt: skip
        torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-5, atol=2e-6)
    assert torch.equal(call(hidden, w, labels, None, 0.7), nll)


def torchtitan() -> None:
    *_, x, labels = problem()
    for classes in (V, V - 3):
        logits = x.detach()[:, :classes].clone().requires_grad_()
        y = labels.clamp(max=classes - 1)
        width = -(-classes // dist.get_world_size())
        begin = dist.get_rank() * width
        shard = logits.detach()[:, begin : begin + width].clone().requires_grad_()
        group = dist.group.WORLD
        found = adapters.loss_parallel_cross_entropy(shard, y, group, classes)
        found.backward()
        exact = F.cross_entropy(logits, y, reduction="sum")
        exact.backward()
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(shard.grad, logits.grad[:, begin : begin + width])
        rows = adapters.loss_parallel_cross_entropy(shard, y, group, classes, "none")
        torch.testing.assert_close(rows, F.cross_entropy(logits, y, reduction="none"))
        kind, message = (ValueError, "logits: expected .* columns on rank") if is_last() else (
            RuntimeError, "on rank")  # fmt: skip
        wrong = shard[:, 1:] if is_last() else shard
        with pytest.raises(kind, match=message):
            adapters.loss_parallel_cross_entropy(wrong, y, group, classes)


def megatron() -> None:
    """Its formula, of which each rank has its own loss where labels are smoothed."""
    torch.manual_seed(1)
    x, labels = torch.randn(5, 2, V), torch.randint(0, V, (5, 2))
    begin, end = bounds(V)
    for smoothing in (0.0, 0.1):
        whole = x.double().requires_grad_()
        logp = torch.log_softmax(whole, -1)
        s = smoothing * (end - begin) / (end - begin - 1)
        nll = -logp.gather(-1, labels[..., None])[..., 0]
        exact = (1 - s) * nll - s * logp[..., begin:end].mean(-1)
        weights = torch.linspace(0.5, 2, 10).view(5, 2)
        (exact * weights).sum().backward()
        shard = x[..., begin:end].clone().requires_grad_()
        found = adapters.vocab_parallel_cross_entropy(shard, labels, smoothing)
        (found * weights).sum().backward()
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(
            shard.grad.double(), whole.grad[..., begin:end], rtol=2e-5, atol=2e-6
        )


CHECKS = {
    check.__name__: check
    for check in (
        against_the_definitions, nothing_in_use, no_labels_a_row, in_place, backward_twice, added_head_gradients, check_dtensors,
        a_group_of_some, given_starts, refusals, one_rank_is_different, failures_after_the_meeting, what_travels, liger,
        torchtitan, megatron,
    )
}  # fmt: skip
