"""Config: the settings of a run (`run_config.py`) and how YAML is read (`config_file.py`)."""
