"""From a captured graph to an executable: the passes in order, the steps of the plan, and the public verbs."""
