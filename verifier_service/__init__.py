"""The verifier: the target model, its memory, and the loop that decides every token."""
