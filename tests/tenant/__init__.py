"""Two features that live here: each a Python file, a header and a row. Nothing else knows them."""
