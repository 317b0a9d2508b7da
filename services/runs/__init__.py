"""Running responses and their logs of events."""
