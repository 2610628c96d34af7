"""Models of transformers: loading them, replacing their layers, checking their results."""
