"""Puts configs/ and constraints.txt into the wheel, inside of txl_dist, and the deployment files;
makes the description for package indexes. Everything else is in pyproject.toml, which can list
packages or find them, but not both.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithConstraints(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "txl_dist" / "constraints.txt"
            self.copy_file("constraints.txt", str(target))


def description() -> str:
    """README.md for package indexes, which have no other file of the repository: without comments,
    targets of links, and what is marked as of the repository only, such as pictures.
    """
    text = Path("README.md").read_text("utf-8")
    text = re.sub(r"<!-- only in the repository -->.*?<!-- end -->\n+", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithConstraints},
    long_description=description(),
    long_description_content_type="text/markdown",
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
