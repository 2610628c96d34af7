"""A model's text side: everything that an orchestrator reads from the model's directory, weights excluded."""
