"""Draft services as the drafter of an ordinary `vllm serve`, on separate devices.

    SPECDEC_DRAFTS=draft-0:50052,draft-1:50052 vllm serve MODEL --speculative-config \\
        '{"method": "custom_class", "model": "specdec.vllm.RemoteDraft", "num_speculative_tokens": 6}'
"""

from specdec.vllm.remote_draft import RemoteDraft

__all__ = ["RemoteDraft"]
