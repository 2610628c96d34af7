"""Benchmarks. Every figure is a ratio of configurations that ran side by side in one run."""
