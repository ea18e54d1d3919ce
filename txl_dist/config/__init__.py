"""Config: what a run is (`run_config.py`) and how it is read from YAML (`config_file.py`)."""
