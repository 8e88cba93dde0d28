"""`kvloop doctor`: small checks, each with a remedy."""
