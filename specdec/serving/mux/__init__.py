"""Multiplexed connections: one gRPC stream carries all streams between two services.

With a gRPC stream per session, a step of sixteen sessions would send sixteen messages, at 0.1 ms each in both event
loops. A *connection* is one gRPC stream between two services that carries all their streams; frames sent at the same
time share a message. Callers and servicers see no difference: `MuxChannel` looks like a gRPC channel to generated
stubs, and a servicer's methods get a context that looks like gRPC's. Every stream keeps its own status, deadline,
cancellation and flow control, as in gRPC.
"""
