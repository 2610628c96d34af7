"""Tools: models made larger or converted to other formats, and tables made of results."""
