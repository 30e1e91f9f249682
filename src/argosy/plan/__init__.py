"""The planner: hardware facts, models of memory and step time, and the search over parallel layouts."""
