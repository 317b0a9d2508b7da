"""Conformance: how far a server keeps to the Responses, Chat Completions, Messages or Decisions API."""
