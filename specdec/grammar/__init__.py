"""Structured output: the tokens that a grammar allows next in a text."""
