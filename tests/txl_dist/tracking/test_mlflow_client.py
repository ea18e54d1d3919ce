"""The one module that imports mlflow: names that it accepts."""

import pytest

from txl_dist.tracking.mlflow_tracker import clean_key


@pytest.mark.fault_row(45)
def test_metric_names_become_legal_and_contain_no_relative_paths() -> None:
    assert clean_key("valid/loss per byte") == "valid/loss per byte"
    assert clean_key("../../etc/x") == "etc/x"
    assert clean_key("/a//b/./c?") == "a/b/c_"
    assert clean_key("..") == "_"
    assert len(clean_key("k" * 999)) == 250
