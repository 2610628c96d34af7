"""The proposers, drafters inside the verifier: n-gram lookup, lookahead windows, local draft, heads, forced tokens."""
