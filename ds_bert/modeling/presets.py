"""Model sizes known by name."""

# layers, hidden size, attention heads. tiny to small as in Turc et al. 2019 (arXiv 1908.08962), base and large as in
# Devlin et al. 2018 (arXiv 1810.04805).
PRESETS = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
