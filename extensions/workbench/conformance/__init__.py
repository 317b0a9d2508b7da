"""Conformance: how far a server keeps to the Responses, Chat Completions or Messages API."""
