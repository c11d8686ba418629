"""Starts a whole suite on one machine: which processes, in which order, and how they end."""
