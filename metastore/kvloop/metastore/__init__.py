"""The directory of decode leases: hints shared by stateless routers, in Redis under key TTLs."""
