"""Eviction policies: `Policy`, its presets and its parts."""
