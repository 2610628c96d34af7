"""Many gRPC streams between two services, carried by one.

Where every session is a stream of its own, a step of sixteen sessions is sixteen messages, and each takes both event
loops a tenth of a millisecond. A *connection* is one stream between two services that carries all of theirs; what they
say at the same time goes in one message. To those who use it nothing changes: `MuxChannel` looks like a gRPC channel to
generated stubs, and a servicer's methods are called with a context that looks like gRPC's. A stream keeps what it has
of gRPC: its status, its deadline, its cancellation, and its own flow control.
"""
