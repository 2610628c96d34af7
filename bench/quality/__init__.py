"""Benchmarks of acceptance and of the diversity of texts."""
