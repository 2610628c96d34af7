"""Structured output: the tokens a grammar allows next in a text."""
