"""Layer 2: precision plugins, each a thin shell over `functional`."""

from lightning_tricks.precision.fp16 import FP16Precision

__all__ = ["FP16Precision"]
