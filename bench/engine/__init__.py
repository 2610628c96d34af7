"""Benchmarks of an engine alone: its step times, without services or drafts."""
