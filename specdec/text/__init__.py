"""A model's text side: everything an orchestrator reads from its directory, without weights."""
