"""Errors, environment variables and stage dumps: what every other folder may use."""
