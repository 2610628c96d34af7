"""The served models: their revisions, the pods of each, and the counts of their requests."""
