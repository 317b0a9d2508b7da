"""Forced replay: tokens that one engine gave pass through another, which says for each how likely it finds it."""
