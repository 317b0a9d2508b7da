"""The frame: pipelines, frames, the protocol and its rules. It imports nothing above."""
