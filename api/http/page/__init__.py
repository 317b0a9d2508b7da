"""The parts of all pages: their head, their style, and the beginning of their script."""
