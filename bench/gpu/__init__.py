"""A run on a GPU: all that only a card can show, step by step, in one report."""
