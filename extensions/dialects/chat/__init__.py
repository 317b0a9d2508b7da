"""The dialect of OpenAI's Chat Completions API."""
