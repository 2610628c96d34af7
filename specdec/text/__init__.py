"""A model's text side: everything that an orchestrator reads from its directory, without weights."""
