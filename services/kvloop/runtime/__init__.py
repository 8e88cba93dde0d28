"""What every kvloop process is built on: errors, tokens, digests, configuration, servers, channels."""
