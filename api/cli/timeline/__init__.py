"""A recording as rows of a terminal."""
