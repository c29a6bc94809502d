"""The server: an engine behind OpenAI's HTTP interface, its live page, its client, and the same on Ray."""
