"""From options to configurations, checked before any work."""
