"""The cost of a step by its rows, and the candidates worth it."""
