"""The core: pipelines, frames, the protocol and its rules.  It imports no other package of penstock."""
