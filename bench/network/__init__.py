"""Benchmarks of what lies between the services: distance, bytes, and the orchestrator's relay."""
