"""The processes of a parallel engine and the communication between them."""
