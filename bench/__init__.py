"""Times cuflash beside the alternatives that people would use: ``python -m bench``."""
