"""What a run needs of the hardware before it starts. For now: the facts about GPUs that MFU is measured against."""
