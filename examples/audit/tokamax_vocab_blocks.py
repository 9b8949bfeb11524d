"""tokamax: its TPU kernels, in Pallas' interpreter, where the vocabulary is no multiple of their block."""

from importlib.metadata import version

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental.pallas import tpu as pltpu
from tokamax._src.ops.linear_softmax_cross_entropy_loss import pallas_mosaic_tpu_kernel as kernel

flags.FLAGS.mark_as_parsed()
blocks = dict(b_block_size=1024, h_block_size=128, v_block_size=128, reduction="sum")
for vocab in (256, 200):
    x = jax.random.normal(jax.random.key(0), (1024, 128))
    w = 0.1 * jax.random.normal(jax.random.key(1), (128, vocab))
    labels = jax.random.randint(jax.random.key(2), (1024,), 0, vocab)
    exact = -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], -1).sum()
    with pltpu.force_tpu_interpret_mode():
        forward = kernel.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu
        loss, lse = forward(x, labels, w, **blocks)
        print(f"tokamax {version('tokamax')}, {vocab} classes: loss {loss:.2f}, exact {exact:.2f}")
        backward = kernel.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu
        try:
            _, dw = jax.block_until_ready(backward(jnp.ones(()), lse, x, labels, w, **blocks))
            print(f"gradient of the head {dw.shape}")
        except Exception as error:
            print("backward:", str(error)[str(error).find("Out-of-bounds") :].split("\n")[0])
