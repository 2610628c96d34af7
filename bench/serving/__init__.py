"""Benchmarks of services with users: latencies, fairness, overload, restarts, learning, and the breakdown of steps."""
