"""Times cuflash beside what people would use instead: ``python -m bench``."""
