"""The proposers, drafters inside the verifier: n-gram lookup, suffix cache, lookahead windows, local draft."""
