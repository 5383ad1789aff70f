"""The decode engine beside transformers: models of known sizes, and checks of layers."""
