"""The command line: commands that work on recordings."""
