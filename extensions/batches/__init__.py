"""Batches: files and lists of requests that fill what interactive clients leave of the engines."""
