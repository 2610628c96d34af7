"""The processes of a parallel engine, and what goes between them."""
