"""TileLoss: losses over a language model's vocabulary, computed in tiles.

The functions live with the framework that they serve: ``tileloss.torch`` for PyTorch, ``tileloss.integrations`` for
Hugging Face transformers and TRL. ``import tileloss`` itself needs neither.
"""

from tileloss._core.library import library_path, version

__version__ = version()
__all__ = ["__version__", "library_path"]
