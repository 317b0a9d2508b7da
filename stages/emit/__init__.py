"""Emit: turn items into the events of the API."""
