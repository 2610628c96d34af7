"""KV cache book-keeping: which slots and blocks belong to which text."""
