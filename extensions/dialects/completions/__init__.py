"""The dialect of OpenAI's Completions API."""
