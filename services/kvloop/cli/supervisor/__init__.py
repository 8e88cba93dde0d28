"""A fleet of kvloop processes on this machine, started, watched and stopped together."""
