"""Ray: the only package that imports it. Launches and supervises training and evaluation."""
