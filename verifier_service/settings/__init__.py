"""Fitted constants of a verifier, with reasons."""
