"""The draft: a small model that grows a tree of guesses ahead of the target."""
