"""Distillation: how far a student's distribution over the vocabulary lies from a teacher's, of which all columns are known or,
as inference servers hand them out, some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from jax import Array
from jax.typing import DTypeLike

from tileloss._core.arguments import DistillationArguments, SparseDistillationArguments
from tileloss._core.other_names import explains_names
from tileloss.jax._apply import apply
from tileloss.jax._arguments import named
from tileloss.jax._rows.distillation import DistillationRows


@explains_names
def distillation(
    logits: Array, teacher: Array, labels: Array | None = None, *, outputs: Iterable[str] = (),
    grad_in_forward: bool | None = None, implementation: str | Iterable[str] | None = None,
    **options: Unpack[DistillationArguments[Array]],
) -> Array | tuple[Array, DistillationRows]:  # fmt: skip
    """Divergence of the student's distribution p from the teacher's q, alone or mixed with the cross-entropy of labels.

    With z = softcap(logit_scale * x) / temperature and p = softmax(z), q likewise of the teacher's logits, a row's loss is

        w_i [label_weight (-log p_y) + divergence_weight s D_i],  s = 1, or T^2 with scale_by_temperature_squared

    Values of divergence, D (jsd is TRL's generalised JSD, whose ends beta = 0 and 1 are forward_kl and reverse_kl here):
        forward_kl: sum q (log q - log p).
        reverse_kl: sum p (log p - log q).
        jsd: m = beta q + (1-beta) p: beta sum q (log q - log m) + (1-beta) sum p (log p - log m).
        jeffreys: forward + reverse.
        skew_forward_kl: m = beta q + (1-beta) p: sum q (log q - log m).
        skew_reverse_kl: m = beta p + (1-beta) q: sum p (log p - log m).
        total_variation: sum |p - q| / 2.

    Args:
        logits: x, the student's, [..., V] float32, bfloat16 or float16. The only argument that is differentiated, in reverse
            mode.
        teacher: the teacher's logits, of the same shape and dtype. Their gradient is 0, as under `jax.lax.stop_gradient`.
        labels: [...] integers; needed where label_weight is not 0. Rows with ``ignore_index`` are not read: they may hold NaN.
        outputs: names of `DistillationRows`: what else to return of each row.
        grad_in_forward: compute the gradient with the loss where one is asked for (scalar losses): the backward then only scales
            it. Default None: True, as on the CPU a backward of its own makes all sums again; but False for float16, which a
            loss scale would reach too late.
        implementation: a name, or names in order of preference, as in `cross_entropy`: "cpu", "cuda" or "xla", which runs on
            TPUs too, as there are no Pallas kernels of this loss.

    Tensors that go with the rows, None for the default:
        mask: [...] or flat [N], any numbers; rows with 0 are neither read nor counted; default: all count.
        token_weights: [...] or flat [N], converted to float32; w_i; default 1.
        allowed: [..., W] or [W], int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all
            are allowed.

    Options, static or traceable as `cross_entropy`'s:
        logit_scale: multiplies the logits; > 0; default 1; static.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0; static.
        temperature: T, divides the logits; > 0; default 1; traceable.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid; static.
        ignore_index: rows with this label are neither read nor counted; default -100; static.
        divergence: which distance of p from q; one of forward_kl, reverse_kl, jsd, jeffreys, skew_forward_kl, skew_reverse_kl,
            total_variation; default forward_kl; static.
        reduction: how the rows' losses become the loss; mean divides by the sum of their weights; one of none, sum, mean;
            default mean; static.
        beta: the mixture's weight, which takes 0 < beta < 1; in [0, 1]; default 0.5; only with divergence jsd or
            skew_forward_kl or skew_reverse_kl; static.
        label_weight: of the labels' cross-entropy in the loss; other than 0 it needs labels; >= 0; default 0; traceable.
        divergence_weight: of the divergence in the loss; >= 0; default 1; traceable.
        label_temperature: the temperature of the cross-entropy and logp, such as 1 where the divergence has 4; > 0; None:
            temperature; traceable.
        teacher_logit_scale: as logit_scale, of the teacher; > 0; None: the student's; static.
        teacher_softcap: as softcap, of the teacher; 0 is off; >= 0; None: the student's; static.
        teacher_temperature: as temperature, of the teacher; > 0; None: the student's; traceable.
        num_items: mean's denominator; >= 0; None: the weights are summed; only with reduction mean; traceable.
        scale_by_temperature_squared: the divergence is multiplied by the temperature squared, as some recipes do; default
            False; static.

    What is not said here is as in `cross_entropy`.

    Returns:
        float32: a scalar, or [...] with reduction "none"; with ``outputs``, (loss, DistillationRows). A row whose label is
        outside [0, valid_vocab) is NaN, and so are its gradient and what it is reduced to: a traced program cannot raise.

    Raises:
        TypeError, ValueError: while tracing, naming the argument, what was expected and what was given.
    """
    return _distillation("distillation", locals())


@explains_names
def linear_distillation(
    hidden: Array, head: Array, teacher_hidden: Array, teacher_head: Array, labels: Array | None = None, *,
    bias: Array | None = None, teacher_bias: Array | None = None, low_rank: tuple[Array, Array] | None = None,
    head_layout: str = "HV", outputs: Iterable[str] = (),
    compute_dtype: DTypeLike | None = None, grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None,
    **options: Unpack[DistillationArguments[Array]],
) -> Array | tuple[Array, DistillationRows]:  # fmt: skip
    """`distillation` of the logits hidden @ head + bias from teacher_hidden @ teacher_head + teacher_bias.

    Neither side's logits are held but for some rows at a time.

    Args:
        hidden: the student's hidden states, [..., H] float32, bfloat16 or float16. Rows that do not count may hold NaN.
        head: its LM head, [H, V] as Flax's kernels, or [V, H] with ``head_layout="VH"``; float32, bfloat16 or float16.
        teacher_hidden: the teacher's hidden states, [..., G]: the same leading dimensions, a width and a dtype of their own.
        teacher_head: its LM head, [G, V], or [V, G] with ``head_layout="VH"``.
        labels: [...] integers; needed where label_weight is not 0.
        bias, teacher_bias: [V].
        low_rank: the student's, as `linear_cross_entropy`'s.
        compute_dtype: what the products of both sides see, bfloat16 or float32; sums are float32 either way. Default: bfloat16
            if both hidden states and both heads are that, else float32.
        grad_in_forward: compute the gradients with the loss: four products. Without it, or with reduction "none", the backward
            makes both sides' logits again: six. Default None: True, but False where the student has a float16 tensor.

    The other arguments, the result and the errors: `distillation`. Gradients are those of hidden, head, bias and low_rank, in
    their dtypes; one that is not asked for costs nothing. The teacher's are 0.
    """
    return _distillation("distillation", locals())


@explains_names
def sparse_distillation(
    logits: Array, teacher_ids: Array, teacher_logprobs: Array, labels: Array | None = None, *, outputs: Iterable[str] = (),
    grad_in_forward: bool | None = None, implementation: str | Iterable[str] | None = None,
    **options: Unpack[SparseDistillationArguments[Array]],
) -> Array | tuple[Array, DistillationRows]:  # fmt: skip
    """`distillation` from a teacher of which only K columns of each row are known.

    q is from teacher_logprobs as they are: no temperature, no transform.

    Values of tail, what becomes of the other columns in the divergence:
        lump: as one more class: its q is 1 less the known ones', its p the sum of theirs.
        ignore: not at all: the divergence is a sum over the K columns, and may be negative.
        renormalise: not at all, and both distributions are divided by their sums over the K columns.

    Args:
        logits: x, the student's, [..., V] float32, bfloat16 or float16. The only argument that is differentiated, in reverse
            mode.
        teacher_ids: [..., K] integers: distinct columns of each row, in any order; negative: none, so that rows may have fewer.
        teacher_logprobs: [..., K] float32, bfloat16 or float16: the logarithms of their probabilities.
        labels: [...]; needed where label_weight is not 0. Their cross-entropy is of the whole softmax.

    Options, static or traceable as `cross_entropy`'s:
        logit_scale: multiplies the logits; > 0; default 1; static.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0; static.
        temperature: T, divides the logits; > 0; default 1; traceable.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid; static.
        ignore_index: rows with this label are neither read nor counted; default -100; static.
        divergence: which distance of p from q; one of forward_kl, reverse_kl, jsd, jeffreys, skew_forward_kl, skew_reverse_kl,
            total_variation; default forward_kl; static.
        reduction: how the rows' losses become the loss; mean divides by the sum of their weights; one of none, sum, mean;
            default mean; static.
        beta: the mixture's weight, which takes 0 < beta < 1; in [0, 1]; default 0.5; only with divergence jsd or
            skew_forward_kl or skew_reverse_kl; static.
        label_weight: of the labels' cross-entropy in the loss; other than 0 it needs labels; >= 0; default 0; traceable.
        divergence_weight: of the divergence in the loss; >= 0; default 1; traceable.
        label_temperature: the temperature of the cross-entropy and logp, such as 1 where the divergence has 4; > 0; None:
            temperature; traceable.
        num_items: mean's denominator; >= 0; None: the weights are summed; only with reduction mean; traceable.
        scale_by_temperature_squared: the divergence is multiplied by the temperature squared, as some recipes do; default
            False; static.
        tail: what becomes of the columns that are not known; one of lump, ignore, renormalise; default lump; static.

    The other arguments, the result and the errors: `distillation`. A row with an id beyond the valid columns, with one that is
    there twice, or with a logarithm above 0, is NaN, as one whose label is out of range.
    """
    return _distillation("sparse_distillation", locals())


@explains_names
def linear_sparse_distillation(
    hidden: Array, head: Array, teacher_ids: Array, teacher_logprobs: Array, labels: Array | None = None, *,
    bias: Array | None = None, low_rank: tuple[Array, Array] | None = None,
    head_layout: str = "HV", outputs: Iterable[str] = (), compute_dtype: DTypeLike | None = None,
    grad_in_forward: bool | None = None, implementation: str | Iterable[str] | None = None,
    **options: Unpack[SparseDistillationArguments[Array]],
) -> Array | tuple[Array, DistillationRows]:  # fmt: skip
    """`sparse_distillation` of the logits hidden @ head + bias, held for some rows at a time alone.

    Arguments: `linear_distillation`, `sparse_distillation`.
    """
    return _distillation("sparse_distillation", locals())


def _distillation(loss: str, arguments: dict[str, Any]) -> Array | tuple[Array, DistillationRows]:
    operand, given = named(arguments)
    found = apply(loss, operand, **given)
    of_rows = {name: x for name, x in found.items() if name != "loss"}
    return (found["loss"], DistillationRows(**of_rows)) if of_rows else found["loss"]
