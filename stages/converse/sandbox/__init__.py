"""Sandboxes: where code and commands that a model wrote run, without a network and without the host's files."""
