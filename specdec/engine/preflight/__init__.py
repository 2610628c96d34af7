"""Preflight: what can be known of a model, its device and its memory before anything heavy is imported."""
