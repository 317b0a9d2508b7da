"""The start of a server, and its end: the engine, the parts that settings decide, serving until a signal."""
