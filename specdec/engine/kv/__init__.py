"""The KV cache: which slots and blocks hold which text."""
