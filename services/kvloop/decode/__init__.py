"""The decode service: it generates answers and is the only authority over the KV it holds afterwards."""
