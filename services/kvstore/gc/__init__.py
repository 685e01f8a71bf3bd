"""Garbage collection: one worker per storage node."""
