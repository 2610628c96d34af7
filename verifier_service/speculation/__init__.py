"""Adaptive speculation: chooses the mode of every step."""
