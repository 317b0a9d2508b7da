"""The stages of a running server, for the operator's page: what passes them, as it comes."""
