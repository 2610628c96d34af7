"""Models for measurements: made larger, and in other formats."""
