"""The simulated engine: a block pool, a cost model and faults, for scale."""
