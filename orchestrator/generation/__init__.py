"""The run of one sample: its sessions at a verifier and at a draft."""
