"""The wire format of the Responses API."""
