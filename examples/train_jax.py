import jax

from tileloss.jax import cross_entropy

tokens = jax.random.randint(jax.random.key(0), (8, 33), 0, 500)  # [B, T+1] of a vocabulary of 500
model = 0.1 * jax.random.normal(jax.random.key(1), (2, 500, 64))  # embedding and LM head


def loss_of(model):
    embedding, lm_head = model
    return cross_entropy(embedding[tokens[:, :-1]] @ lm_head.T, tokens[:, 1:])


def step(model, _):
    loss, gradient = jax.value_and_grad(loss_of)(model)
    return model - 30 * gradient, loss


model, losses = jax.lax.scan(step, model, length=40)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
