"""Recordings of a server of any make: a proxy in front of it, and what its answers are to penstock."""
