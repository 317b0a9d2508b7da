"""What starts a server and ends it: the engine, the parts that settings decide, serving until a signal."""
