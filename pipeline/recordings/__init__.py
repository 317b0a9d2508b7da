"""Recorded frames: the file format, the recorder, and tools that compare and shrink recordings."""
