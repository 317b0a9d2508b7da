"""The page of the operator about what was used."""
