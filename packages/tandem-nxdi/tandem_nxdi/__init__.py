"""Implements the runner protocol with NxD Inference: `--backend nxdi`, for Trainium and Inferentia.

Only `sdk.py` imports NxD Inference; every other module runs anywhere. See docs/trainium-nxdi.md.
"""
