"""The page and the charts, from the evidence alone."""
