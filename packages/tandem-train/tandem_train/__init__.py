"""Trains and evaluates draft models."""
