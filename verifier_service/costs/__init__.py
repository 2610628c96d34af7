"""The cost of a step, by its rows, and the candidates that are worth it."""
