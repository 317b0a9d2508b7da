"""Requests to the web that cannot reach private networks."""
