"""The router: serves turns over prefill and decode workers, without state, engine or tokenizer."""
