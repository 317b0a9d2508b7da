"""Resources: routes beside the dialects, each group of which comes through the door."""
