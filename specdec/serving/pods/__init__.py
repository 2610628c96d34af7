"""Pods of another role: found by their addresses, reached, and left alone while they fail."""
