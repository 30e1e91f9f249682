"""Measuring what this machine reaches: step time, kernel rates, bandwidth, and layouts rehearsed without devices."""
