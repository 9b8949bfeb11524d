"""TileLoss for JAX. So far its row stage: private modules that the implementations "pallas_tpu" and "xla" are made of.

_rows/   from a row's state to losses, row outputs, metrics, and the four coefficients of its gradient: [N] numbers in jnp
"""
