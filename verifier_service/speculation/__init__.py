"""Whether and how a step speculates."""
