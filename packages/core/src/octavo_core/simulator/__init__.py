"""Replays a trace of arrivals through the real scheduler, on a virtual clock."""
