"""The commands that look at recordings."""
