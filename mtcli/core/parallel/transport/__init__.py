"""Transports of collectives: process groups, or shared memory between the ranks of a machine."""
