"""Reads run directories, and nothing else: live view, dashboard, report, diagnosis. Works after death, and without torch."""
