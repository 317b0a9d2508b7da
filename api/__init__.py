"""The edges: HTTP and the command line. Nothing below imports this package."""
