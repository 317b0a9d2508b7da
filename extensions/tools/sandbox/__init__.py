"""Sandboxes: code and commands of a model run here, without a network and without the host's files."""
