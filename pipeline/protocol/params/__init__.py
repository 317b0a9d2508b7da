"""Request bodies: pydantic models, as their errors name the wrong value; ``normalize`` makes msgspec structs of them."""
