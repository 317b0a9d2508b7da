"""Knowledge about models: vocabularies, templates and output formats."""
