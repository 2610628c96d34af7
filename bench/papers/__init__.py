"""Methods of speculative decoding on the papers' prompts, with the papers' measures."""
