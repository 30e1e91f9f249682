"""What a run needs before it starts: hardware facts, memory and time of a layout, and the search for the best one."""
