"""The gateway: OpenAI's and Anthropic's HTTP APIs over RouterService. No GPU, no engine, no state."""
