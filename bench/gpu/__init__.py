"""A run on a GPU: all checks that need a card, step by step, in one report."""
