"""Preflight: checks of a model, its device and its memory before anything large is imported."""
