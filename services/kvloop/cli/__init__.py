"""Commands for people: serve, up, chat, leases, model, demo."""
