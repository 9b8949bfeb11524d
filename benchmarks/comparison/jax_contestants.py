"""Who takes part from JAX. Each is jitted, and compiled when it is set up; donated logits give their memory to the gradient.

Inputs and outputs are shared with torch, without a copy. Only memory of XLA's own can be given away: donated logits are a copy
that is put back after each step, as torch's are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tileloss.jax
from comparison.contestants import OURS, Output, Step, contestant
from comparison.inputs import EPSILON, Inputs, OwnLogits, jax_array
from tileloss.jax._sweeps.library import is_built

# Of tileloss.jax, those that run on a CPU.
IMPLEMENTATIONS = ("cpu", "xla") if is_built() else ("xla",)


def outputs_of(found: tuple[Any, tuple[Any, ...]]) -> Output:
    """Once they have been computed."""
    import jax

    loss, gradients = jax.block_until_ready(found)
    return torch.from_dlpack(loss), tuple(torch.from_dlpack(gradient) for gradient in gradients)


def step_of(inputs: Inputs, loss: Callable[..., Any], is_donated: bool = False) -> Step:
    """Of loss(logits, labels), or loss(hidden, head, labels) with the head [V, H]; the gradients of all but the labels."""
    import jax
    import jax.numpy as jnp

    operands = tuple(map(jax_array, inputs.operands))
    labels = jnp.asarray(inputs.labels.numpy())
    if is_donated:
        assert inputs.pristine is not None
        inputs.own_logits = inputs.own_logits or OwnLogits(inputs.pristine)

    def given() -> tuple[Any, ...]:
        return (inputs.own_logits.array,) if is_donated else operands

    gradients = jax.value_and_grad(loss, argnums=tuple(range(len(operands))))
    jitted = jax.jit(gradients, donate_argnums=0 if is_donated else ())
    run = jitted.lower(*given(), labels).compile()
    return lambda: outputs_of(run(*given(), labels))


def on_logits(
    group: str, name: str, loss_of: Callable[[Inputs], Callable[..., Any]], **more: Any
) -> None:
    """Registers both: with logits that are kept, and with donated ones."""

    @contestant(group, f"JAX: {name}", **more)
    def _(inputs: Inputs) -> Step:
        return step_of(inputs, loss_of(inputs))

    @contestant(group, f"JAX: {name}, donated", in_place=True, **more)
    def _(inputs: Inputs) -> Step:
        return step_of(inputs, loss_of(inputs), is_donated=True)


# ----------------------------------------------------------------------------------------------------------- TileLoss


def register_ours(implementation: str) -> None:
    name, options = f"TileLoss {implementation}", {"implementation": implementation}

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return tileloss.jax.cross_entropy(logits, labels, **options)

    def grpo(inputs: Inputs) -> Callable[..., Any]:
        batch = (inputs.shape.sequences, -1)
        old_logp, advantages = jax_array(inputs.old_logp), jax_array(inputs.advantages)
        old_logp = old_logp.reshape(batch)
        return lambda logits, labels: tileloss.jax.policy_loss(
            logits.reshape(*batch, logits.shape[-1]),
            labels.reshape(batch),
            advantages,
            old_logp=old_logp,
            preset="grpo",
            epsilon_low=EPSILON,
            epsilon_high=EPSILON,
            **options,
        )

    def linear(hidden: Any, head: Any, labels: Any) -> Any:
        return tileloss.jax.linear_cross_entropy(hidden, head, labels, head_layout="VH", **options)

    on_logits("cross_entropy", name, lambda _: cross_entropy, tolerance=OURS)
    on_logits("grpo", name, grpo, tolerance=OURS)
    contestant("linear_cross_entropy", f"JAX: {name}", tolerance=OURS, max_rounds=2)(
        lambda inputs: step_of(inputs, linear)
    )


for each in IMPLEMENTATIONS:
    register_ours(each)


# ------------------------------------------------------------------------------------------------------ cross-entropy


def plain_logp(logits: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]


def plain_cross_entropy(logits: Any, labels: Any) -> Any:
    return -plain_logp(logits, labels).mean()


def optax_cross_entropy(logits: Any, labels: Any) -> Any:
    import jax.numpy as jnp
    import optax

    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


on_logits("cross_entropy", "optax", lambda _: optax_cross_entropy)
on_logits("cross_entropy", "plain", lambda _: plain_cross_entropy)


# -------------------------------------------------------------------------------------------------------------- GRPO


def plain_grpo(inputs: Inputs) -> Callable[..., Any]:
    import jax.numpy as jnp

    old_logp, advantages = jax_array(inputs.old_logp), jax_array(inputs.advantages)[:, None]

    def loss(logits: Any, labels: Any) -> Any:
        ratio = jnp.exp(plain_logp(logits, labels) - old_logp).reshape(len(advantages), -1)
        clipped = jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON)
        return -jnp.minimum(ratio * advantages, clipped * advantages).mean(-1).mean()

    return loss


on_logits("grpo", "plain", plain_grpo)


# ------------------------------------------------------------------------------------- cross-entropy with the LM head


# XLA's products in bfloat16 on a CPU take some 40 s a step at the LM head of Qwen2.5-1.5B.
@contestant("linear_cross_entropy", "JAX: plain", max_rounds=2)
def _(inputs: Inputs) -> Step:
    return step_of(
        inputs, lambda hidden, head, labels: plain_cross_entropy(hidden @ head.T, labels)
    )


@contestant("linear_cross_entropy", "JAX: tokamax", max_rounds=2)
def _(inputs: Inputs) -> Step:
    from absl import flags
    from tokamax import linear_softmax_cross_entropy_loss

    flags.FLAGS.mark_as_parsed()  # or tokamax would parse this process's command line
    return step_of(
        inputs,
        lambda hidden, head, labels: linear_softmax_cross_entropy_loss(
            hidden, labels, head.T, reduction="mean"
        ),
    )
