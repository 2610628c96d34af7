"""KV cache book-keeping: the slots and blocks of each text."""
