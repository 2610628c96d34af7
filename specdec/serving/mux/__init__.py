"""Multiplexed connections: one gRPC stream carries all streams between two services.

If every session were a gRPC stream of its own, a step of sixteen sessions would be sixteen messages, and each takes
both event loops a tenth of a millisecond. A *connection* is one gRPC stream between two services that carries all of
their streams; frames that are sent at the same time go in one message. Callers and servicers see no difference:
`MuxChannel` looks like a gRPC channel to generated stubs, and a servicer's methods are called with a context that looks
like gRPC's. Each stream keeps its own status, deadline, cancellation and flow control, as in gRPC.
"""
