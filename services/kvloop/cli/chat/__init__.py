"""Streamed multi-turn chat against a router."""
