"""Decoding with a whole model: `Decoder` reads texts and continues them, from packed weights."""

from kvlab.engine.decoder import Decoder

__all__ = ["Decoder"]
