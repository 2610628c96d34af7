"""Tools: models made larger or written in other formats, and tables made of results."""
