"""What a step of an engine takes, on its own: no services, no drafts."""
