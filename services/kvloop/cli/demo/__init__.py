"""One agent conversation, with reuse and without, on the same engines."""
