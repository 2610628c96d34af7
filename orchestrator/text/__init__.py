"""The text of a sample: the check of its commits, and the responses and the timeline made from them."""
