"""Structured output: which tokens a grammar lets a text go on with."""
