"""The Engine port and what stands behind it: vLLM, and a simulated engine for scale and faults."""
