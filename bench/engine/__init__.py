"""Benchmarks of an engine alone: how long its steps take, without services or drafts."""
