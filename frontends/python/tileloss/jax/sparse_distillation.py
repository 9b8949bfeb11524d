"""Distillation from a teacher of which some columns are known, as inference servers hand them out."""

from __future__ import annotations

from collections.abc import Iterable

from jax import Array
from jax.typing import DTypeLike

from tileloss._core.other_names import explains_names
from tileloss.jax._apply import apply
from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.distillation import DistillationRows, with_rows


@explains_names
def sparse_distillation(
    logits: Array,
    teacher_ids: Array,
    teacher_logprobs: Array,
    labels: Array | None = None,
    *,
    outputs: Iterable[str] = (),
    grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None,
    # generated: arguments of sparse_distillation but temperature_on
    mask: Array | None = None,
    token_weights: Array | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    temperature: Number = 1.0,
    valid_vocab: int | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    reduction: str = "mean",
    beta: float = 0.5,
    label_weight: Number = 0.0,
    divergence_weight: Number = 1.0,
    label_temperature: Number | None = None,
    num_items: Number | None = None,
    scale_by_temperature_squared: bool = False,
    tail: str = "lump",
    # end of generated
) -> Array | tuple[Array, DistillationRows]:
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
    return with_rows(apply("sparse_distillation", locals()))


@explains_names
def linear_sparse_distillation(
    hidden: Array,
    head: Array,
    teacher_ids: Array,
    teacher_logprobs: Array,
    labels: Array | None = None,
    *,
    bias: Array | None = None,
    head_layout: str = "HV",
    outputs: Iterable[str] = (),
    compute_dtype: DTypeLike | None = None,
    grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None,
    # generated: arguments of sparse_distillation but temperature_on
    mask: Array | None = None,
    token_weights: Array | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    temperature: Number = 1.0,
    valid_vocab: int | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    reduction: str = "mean",
    beta: float = 0.5,
    label_weight: Number = 0.0,
    divergence_weight: Number = 1.0,
    label_temperature: Number | None = None,
    num_items: Number | None = None,
    scale_by_temperature_squared: bool = False,
    tail: str = "lump",
    # end of generated
) -> Array | tuple[Array, DistillationRows]:
    """`sparse_distillation` of the logits hidden @ head + bias, held for some rows at a time alone.

    Arguments: `linear_distillation`, `sparse_distillation`.
    """
    return with_rows(apply("sparse_distillation", locals()))
