"""`kvloop top`: a deployment at a glance, as it changes."""
