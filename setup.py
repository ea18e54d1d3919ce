"""Puts configs/ into the wheel, as txl_dist/configs. Everything else is in pyproject.toml, which
can list packages or find them, but not both.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["cluster*", "data_pipeline*", "txl_dist*"]),
        "txl_dist.configs",
    ],
    package_dir={"txl_dist.configs": "configs"},
    package_data={"": ["py.typed"], "txl_dist.configs": ["**/*.yaml", "**/*.toml"]},
    include_package_data=False,  # no other file, even if the sdist has it
)
