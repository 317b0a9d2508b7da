"""The dialect of OpenAI's Decisions API."""
