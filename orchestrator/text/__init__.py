"""The text of a sample: its committed tokens, and the responses made from them."""
