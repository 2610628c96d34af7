"""Code for both ends of the wire: addresses, TLS files, request ids, token sources, tool calls."""
