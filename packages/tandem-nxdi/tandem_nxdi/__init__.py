"""`--backend nxdi`: runs models with NxD Inference on Trainium and Inferentia (docs/trainium-nxdi.md).

Only `sdk.py` imports NxD Inference; other modules run anywhere.
"""
