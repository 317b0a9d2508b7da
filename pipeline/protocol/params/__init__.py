"""Request bodies: pydantic models, as their errors name the wrong value.  ``normalize`` makes structs of them."""
