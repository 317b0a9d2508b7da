"""Yielding: lines of batches run where others leave room, and give it back when they need it."""
