"""Suites of tests that run at the same time share nothing outside their temporary folders."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch.utils.cpp_extension import get_default_build_root
from triton import knobs

from data_pipeline.shards.shard_files import FrameCache

ROOT = Path(__file__).parents[1]


def test_ray_compilers_and_caches_use_the_temporary_folder_of_the_suite() -> None:
    folders = (get_default_ray_temp_dir(), cache_dir(), triton_cache_dir(0), knobs.cache.dir)
    for folder in (*folders, get_default_build_root(), FrameCache.of_user().directory):
        assert Path(folder).is_relative_to(tempfile.gettempdir())


def test_another_suite_gets_another_folder_which_ends_with_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
    result = subprocess.run(
        [sys.executable, "-c", "import tempfile, tests.conftest; print(tempfile.gettempdir())"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "TMPDIR": str(tmp_path)},
    )
    assert Path(result.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.iterdir())
