"""Number formats for people: amounts, bytes, durations."""

from __future__ import annotations


def amount(number: float) -> str:
    """Format a number with a suffix: 1234567 -> 1.23M."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def digits(value: float) -> str:
    """Format with at least three significant digits: 0.0174, 1.44, 57.3, 1,234.5."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def volume(size: float) -> str:
    """Format bytes: 1234567890 -> 1.23GB."""
    return amount(size).replace("B", "G") + "B"


def clock(seconds: float) -> str:
    """Format seconds as a duration: 4000 -> 1h06m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole / 86400:.1f}d"
