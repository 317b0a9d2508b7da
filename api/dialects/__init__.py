"""The dialects of penstock, and the door through which those of operators come in."""
