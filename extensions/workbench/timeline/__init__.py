"""The timeline of a recording, which the terminal and the page draw."""
