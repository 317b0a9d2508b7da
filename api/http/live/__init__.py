"""The live page, on which the operator talks to the model and watches what passes the stages."""
