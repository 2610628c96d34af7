"""Models of transformers: loading them, changing their layers, checking what they compute."""
