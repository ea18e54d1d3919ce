"""The txl command of a job: `txl`, but it ends when `job_driver.py`, which starts it, has ended."""

from data_pipeline.system.signals import end_with_parent
from txl_dist.__main__ import main

if __name__ == "__main__":
    end_with_parent(0)  # the driver holds the other end of standard input
    main()
