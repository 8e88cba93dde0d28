"""The prefill service: it makes a prompt's KV ready, reading back what a decode worker still holds."""
