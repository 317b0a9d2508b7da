"""The rules of a stream of events."""
