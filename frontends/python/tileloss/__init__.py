"""TileLoss: losses over a language model's vocabulary, computed in tiles.

The functions live with the framework that they serve: ``tileloss.torch`` for PyTorch, ``tileloss.jax`` for JAX,
``tileloss.integrations`` for Hugging Face transformers and TRL; ``tileloss.testing`` checks any loss in anybody's tests.
``import tileloss`` itself needs none of them.
"""

from tileloss._core.library import library_path, version

__version__ = version()
__all__ = ["__version__", "library_path"]
