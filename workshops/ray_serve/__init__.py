"""Runs server roles as autoscaled Ray Serve applications."""
