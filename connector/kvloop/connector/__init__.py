"""vLLM KV connector plugin: KV held in the pool beyond its turn, pinned, read back, never read wrong."""
