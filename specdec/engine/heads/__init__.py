"""Heads: small models that guess tokens ahead from a target's hidden states."""
