"""Puts configs/ and constraints.txt into the wheel, inside of txl_dist, and the deployment files.
Everything else is in pyproject.toml, which can list packages or find them, but not both.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithConstraints(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "txl_dist" / "constraints.txt"
            self.copy_file("constraints.txt", str(target))


setup(
    cmdclass={"build_py": BuildWithConstraints},
    packages=[
        *find_packages(include=["cluster*", "data_pipeline*", "txl_dist*"]),
        "txl_dist.configs",
    ],
    package_dir={"txl_dist.configs": "configs"},
    package_data={
        "": ["py.typed"],
        "cluster": [f"deploy/**/{name}" for name in ("*.md", "*.sh", "*.yaml", "Dockerfile")],
        "txl_dist.configs": ["**/*.yaml", "**/*.toml"],
    },
    include_package_data=False,  # no other file, even if the sdist has it
)
