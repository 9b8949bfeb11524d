"""TileLoss in place of the losses of Hugging Face transformers and TRL; each module names its versions."""
