"""Measures how well a draft serves a target, before the pair is deployed."""
