"""The text of a sample: the check of its verifier's messages, and the responses and the timeline made from them."""
