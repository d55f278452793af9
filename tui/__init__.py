"""Draws what the store says; works nothing itself."""
