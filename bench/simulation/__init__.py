"""Simulation of the services on a virtual clock: their real code, with modelled devices and a modelled network.

Real are orchestrator, peer streams, servicers, response queues, both loops, sessions, trees and every policy. Modelled
are the time of a forward pass, the sharing of a device, the language of target and draft, and the transport of a
message. Left out is the processor time of all of this, so that a step takes as long as its forward pass.
"""
