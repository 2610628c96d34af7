"""Benchmarks of acceptance and of texts: which candidates are accepted, and how varied texts are."""
