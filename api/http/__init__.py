"""The parts that all routes share: bodies, errors, keys, pages of lists, server-sent events, OpenAPI document."""
