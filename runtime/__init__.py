"""The plan as data, its memory, its threads, the object that a user calls, and its file form. Knows nothing of patterns."""
