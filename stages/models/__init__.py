"""Facts about models: vocabularies, templates, output formats."""
