"""The verifier service: the target model, its memory, and the step loop, which decides every token."""
