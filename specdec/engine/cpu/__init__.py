"""The torch engine on the CPU: ragged batches, their attention, and decoders of the Llama kind in compiled loops."""
