"""A small language model in Flax NNX, trained by optax: once with optax's loss, once with TileLoss's. The curves are the same."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tileloss.jax import cross_entropy

VOCABULARY, WIDTH, STEPS = 3000, 32, 50
TOKENS = jax.random.randint(jax.random.key(0), (4, 25), 0, VOCABULARY)  # [B, T+1]


class LanguageModel(nnx.Module):
    """One block of causal attention: [B, T] tokens -> [B, T, V] logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        return self.lm_head(x)


def optax_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(loss_of_logits) -> jax.Array:
    """The loss of each step."""
    model = LanguageModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss_of(model):
            return loss_of_logits(model(TOKENS[:, :-1]), TOKENS[:, 1:])

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    return jnp.stack([step(model, optimizer) for _ in range(STEPS)])


if __name__ == "__main__":
    theirs, ours = train(optax_loss), train(cross_entropy)
    for name, losses in (("optax", theirs), ("tileloss", ours)):
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"largest difference {jnp.max(jnp.abs(ours - theirs)):.1e}")
