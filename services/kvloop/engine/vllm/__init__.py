"""The vLLM engine: AsyncLLM behind the Engine port."""
