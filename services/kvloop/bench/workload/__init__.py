"""What is asked of a target: conversations, made from a seed or read from a file."""
