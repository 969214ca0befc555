"""`sashiko bench`: models beside their peers. Each candidate lives in a process of its own; they take turns on the same cores."""
