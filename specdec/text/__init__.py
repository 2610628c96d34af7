"""Text of a model: what an orchestrator reads of its directory, without weights."""
