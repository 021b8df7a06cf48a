"""Training and validation of any timm model: what the scripts ``train.py`` and ``validate.py`` are made of."""
