"""Job files: a run as a TOML file, checked as a whole before anything starts.

    Job.load("job.toml", ["learners=8"])    the record, or one `JobError` with every problem
    Job.builtin()                           the job that ships with the package
    sl.train(**job.build())                 names become objects; what cannot work together is refused here
    job.dumps()                             the job as it ran

Reading order: job (the record: what a job may say), keys (what each key may be), checks (of several keys), names (names to
callables), build, toml.
"""

from __future__ import annotations

from syncline.jobs.job import KEYS, Job
from syncline.jobs.keys import JobError, Key, Named
from syncline.jobs.names import NAMES
from syncline.jobs.toml import dumps

__all__ = ["KEYS", "NAMES", "Job", "JobError", "Key", "Named", "dumps"]
