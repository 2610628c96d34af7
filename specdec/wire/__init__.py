"""Both ends of the wire share this: addresses, TLS files, request ids, token sources, tool calls."""
