"""Pods of another role: discovery, channels, circuit breakers."""
