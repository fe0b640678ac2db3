"""Advantages become losses, and losses an optimiser step."""
