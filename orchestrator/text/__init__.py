"""The text of a sample: its committed tokens, and the responses made of them."""
