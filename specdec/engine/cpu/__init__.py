"""Parts of the torch engine on the CPU: ragged batches, their attention, and decoder layers of the Llama kind."""
