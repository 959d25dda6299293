"""What every rank needs. Imported once, by the server that the ranks are forked from: importing costs seconds."""

import tests.behaviour_cases
import tests.checkpoint_cases
import tests.jobs_worker
import tests.strategy_cases  # noqa: F401
