"""A recording as a timeline in the terminal."""
