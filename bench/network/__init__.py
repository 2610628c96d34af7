"""Benchmarks of the links between services: distance, bytes, and the orchestrator's relay."""
