"""The torch engine on the CPU: ragged batches, their attention, and compiled decoder layers of the Llama kind."""
