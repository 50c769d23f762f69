"""NxD Inference behind the runner protocol: `--backend nxdi`, for Trainium and Inferentia.

Only `sdk.py` imports it; everything else here is pure and runs anywhere. See docs/trainium-nxdi.md.
"""
