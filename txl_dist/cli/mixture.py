"""`txl data mix`: the share of each corpus in an epoch, computed before the run."""

import json
from dataclasses import asdict

from txl_dist.cli.options import AsJson, ConfigPath, Overrides


def mix(config: ConfigPath, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Show the tokens that one epoch reads of each corpus, and its number of passes.

    Example: txl data mix run.yaml data.mixture.web.weight=3
    """
    from txl_dist.config.config_file import load_run_config
    from txl_dist.training.data import first_phase, open_corpora
    from txl_dist.training.phases import realised_shares

    data = load_run_config(config, overrides or []).data
    phase = first_phase(open_corpora(data), data.train_split, num_lanes=data.num_lanes)
    shares = realised_shares(phase)
    if as_json:
        corpora = {share.name: {**asdict(share), "passes": share.passes} for share in shares}
        print(json.dumps({"tokens_per_epoch": phase.num_tokens, "corpora": corpora}))
        return
    print(f"one epoch reads {phase.num_tokens:,} tokens of split {data.train_split!r}")
    for share in shares:
        print(f"  {share.line}")
