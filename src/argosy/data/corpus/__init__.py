"""A prepared corpus on disk: its file formats, its reader, and the commands that inspect, verify, merge and convert corpora."""
